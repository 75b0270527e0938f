// One row a block, held in registers: reductions, and rounding to int8. Follows common.cuh.
// Macros: THREADS, a multiple of 32; UNITS: 16-byte units (8 columns) of a thread, unit u of thread i being u THREADS + i;
//   ROUNDED: see store_int8; BF16.

struct Row { float v[UNITS][8]; };

DEVICE void unpack(const uint4& from, float (&to)[8]) {
#pragma unroll
  for (int j = 0; j < 4; j++) {
    to[2 * j] = act_to_float(word(from, j) & 0xffff);
    to[2 * j + 1] = act_to_float(word(from, j) >> 16);
  }
}
DEVICE uint4 pack(const float (&v)[8]) {
  return make_uint4(floats_to_acts(v[0], v[1]), floats_to_acts(v[2], v[3]), floats_to_acts(v[4], v[5]),
                    floats_to_acts(v[6], v[7]));
}

// Sum, or maximum, over the block; every thread gets it. `scratch`: THREADS / 32 floats of shared memory, once a call.
template <bool MAX>
DEVICE float block_reduce(float v, float* scratch) {
#pragma unroll
  for (int d = 16; d; d >>= 1) {
    const float other = __shfl_xor_sync(0xffffffffu, v, d);
    v = MAX ? fmaxf(v, other) : v + other;
  }
  if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = v;
  __syncthreads();
  v = scratch[0];
#pragma unroll
  for (int i = 1; i < THREADS / 32; i++) v = MAX ? fmaxf(v, scratch[i]) : v + scratch[i];
  return v;
}

// The block's row to int8, scale = max |x| / 127 in scales[row]. ROUNDED: not as codes but as code times scale, in 16 bits again
// (scales are not written).
DEVICE void store_int8(const Row& x, int row, int columns, u8* codes, float* scales, float* scratch) {
  float peak = 0.f;
#pragma unroll
  for (int u = 0; u < UNITS; u++)
#pragma unroll
    for (int j = 0; j < 8; j++) peak = fmaxf(peak, fabsf(x.v[u][j]));
  peak = block_reduce<true>(peak, scratch);
  const float inverse = peak > 0.f ? 127.f / peak : 0.f;  // |x inverse| rounds to 127 at most
  const float magic = 12582912.f;                        // 1.5 x 2^23: adding it rounds, ties to even, into the low bits
#if !ROUNDED
  if (threadIdx.x == 0) scales[row] = peak / 127.f;
#endif
#pragma unroll
  for (int u = 0; u < UNITS; u++) {
    const int i = u * THREADS + threadIdx.x;
    if (i >= columns / 8) continue;
    const u64 at = (u64)row * (columns / 8) + i;
#if ROUNDED
    float rounded[8];
#pragma unroll
    for (int j = 0; j < 8; j++)
      rounded[j] = (__fmaf_rn(x.v[u][j], inverse, magic) - magic) * (peak / 127.f);
    ((uint4*)codes)[at] = pack(rounded);
#else
    u32 r[8], q[2];
#pragma unroll
    for (int j = 0; j < 8; j++) r[j] = __float_as_uint(__fmaf_rn(x.v[u][j], inverse, magic));
#pragma unroll
    for (int k = 0; k < 2; k++)
      q[k] = __byte_perm(__byte_perm(r[4 * k], r[4 * k + 1], 0x40), __byte_perm(r[4 * k + 2], r[4 * k + 3], 0x40), 0x5410);
    ((uint2*)codes)[at] = make_uint2(q[0], q[1]);
#endif
  }
}
