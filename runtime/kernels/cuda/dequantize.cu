// Weights in fragment order (layout.py) back to [rows, K] in 16 bits, for products with so many tokens that a
// 16-bit matrix product is faster. One warp writes 16 rows x 64 columns. Values: (code - zero) scale, rounded once.
//
// Macros: WEIGHT_BITS 4 | 8; ACT_BITS 16 | 8 (which fragment order); BF16; SCALE_BF16; GROUP 0 | 32 | 64 | 128; ASYM.

#define WARPS 8
#define LOADS (WEIGHT_BITS / 4)

// The code of row g (row = 0) or g + 8 (1) and column column_at(t, h) + j of a lane's chunk.
DEVICE int code_at(const uint4 (&q)[LOADS], int row, int h, int j) {
#if WEIGHT_BITS == 4 && ACT_BITS == 16
  return (word(q[0], j >> 1) >> (4 * (row + 2 * h + 4 * (j & 1)))) & 15;
#elif WEIGHT_BITS == 4
  return ((word(q[0], 2 * h + (j >> 2)) >> (8 * (j & 3) + 4 * row)) & 15) ^ 8;
#elif ACT_BITS == 16
  return (word(q[h], j >> 1) >> (8 * (2 * row + (j & 1)))) & 255;
#else
  return ((word(q[row], 2 * h + (j >> 2)) >> (8 * (j & 3))) & 255) ^ 128;
#endif
}
// Where the two runs of 8 columns begin that a lane has (layout.py).
DEVICE int column_at(int t, int h) { return ACT_BITS == 16 ? 32 * h + 8 * t : 16 * t + 8 * h; }

// W, S, Z as in skinny.cu; Y: [rows, 64 chunks] for the 16-row tiles first_tile .. first_tile + gridDim.y - 1.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
dequantize(const uint4* __restrict__ W, const void* __restrict__ S, const u16* __restrict__ Z, u16* Y,
           int N, int chunks, int first_tile) {
  pdl_launch_dependents();
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int tile = first_tile + blockIdx.y, chunk = blockIdx.x * WARPS + (threadIdx.x >> 5);
  pdl_wait();
  if (chunk >= chunks) return;
  uint4 q[LOADS];
#pragma unroll
  for (int i = 0; i < LOADS; i++) q[i] = load_weights(W + ((u64)tile * chunks + chunk) * (LOADS * 32) + i * 32 + unit_place(lane));
#pragma unroll
  for (int h = 0; h < 2; h++) {
#if GROUP
    const u32 group = (u32)tile * (chunks * 64 / GROUP) + (chunk * 64 + column_at(t, h)) / GROUP;
    const u32 scales = __ldg((const u32*)S + group * 8 + g);
#else
    const u32 group = tile;
#endif
#if ASYM
    const u32 zeros = __ldg(Z + group * 8 + g);
#endif
#pragma unroll
    for (int row = 0; row < 2; row++) {
      const int n = tile * 16 + g + 8 * row;
      if (n >= N) continue;
#if !GROUP
      const float scale = __ldg((const float*)S + n);
#elif SCALE_BF16
      const float scale = bf16_to_float(row ? scales >> 16 : scales & 0xffff);
#else
      const float scale = half_to_float(row ? scales >> 16 : scales & 0xffff);
#endif
#if ASYM
      const int zero = row ? zeros >> 8 : zeros & 255;
#else
      const int zero = 1 << (WEIGHT_BITS - 1);
#endif
      u32 out[4];
#pragma unroll
      for (int k = 0; k < 4; k++)
        out[k] = floats_to_acts(scale * (code_at(q, row, h, 2 * k) - zero), scale * (code_at(q, row, h, 2 * k + 1) - zero));
      uint4 v;
      v.x = out[0]; v.y = out[1]; v.z = out[2]; v.w = out[3];
      *(uint4*)(Y + (u64)(n - first_tile * 16) * chunks * 64 + chunk * 64 + column_at(t, h)) = v;
    }
  }
}
