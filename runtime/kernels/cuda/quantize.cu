// Activations [M, K] to int8, one scale a token: scale = max |x| / 127, q = round(x / scale), K a multiple of 64.
//
// Within each 64 columns the bytes are stored in the order in which the lanes of skinny.cu read them: column
// 32 h + 8 t + j goes to byte 16 t + 8 h + j, so that one 16-byte load serves both tensor-core steps of a lane.
// One block a token. Macros: BF16; THREADS.

extern "C" __global__ void __launch_bounds__(THREADS)
quantize_rows(const u8* X, u8* Q, float* scales, int K) {
  pdl_launch_dependents();
  __shared__ float warp_max[THREADS / 32];
  const uint4* x = (const uint4*)(X + (u64)blockIdx.x * K * 2);
  pdl_wait();
  float peak = 0.f;
  for (int i = threadIdx.x; i < K / 8; i += THREADS) {
    const uint4 v = load_activations(x + i);
#pragma unroll
    for (int j = 0; j < 4; j++)
      peak = fmaxf(peak, fmaxf(fabsf(act_to_float(word(v, j) & 0xffff)), fabsf(act_to_float(word(v, j) >> 16))));
  }
#pragma unroll
  for (int d = 16; d; d >>= 1) peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, d));
  if ((threadIdx.x & 31) == 0) warp_max[threadIdx.x >> 5] = peak;
  __syncthreads();
#pragma unroll
  for (int j = 0; j < THREADS / 32; j++) peak = fmaxf(peak, warp_max[j]);
  if (threadIdx.x == 0) scales[blockIdx.x] = peak / 127.f;
  const float inverse = peak > 0.f ? 127.f / peak : 0.f;
  for (int i = threadIdx.x; i < K / 8; i += THREADS) {
    const uint4 v = load_activations(x + i);
    u32 q[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const u32 pair = word(v, j >> 1);
      const int r = __float2int_rn(act_to_float(j & 1 ? pair >> 16 : pair & 0xffff) * inverse);
      q[j >> 2] |= (u32)(max(-127, min(127, r)) & 255) << (8 * (j & 3));
    }
    const int chunk = i >> 3, h = (i >> 2) & 1, t = i & 3;
    uint2 out;
    out.x = q[0];
    out.y = q[1];
    *(uint2*)(Q + (u64)blockIdx.x * K + chunk * 64 + t * 16 + h * 8) = out;
  }
}
