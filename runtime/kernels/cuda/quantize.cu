// Activations [M, K] to int8, one scale a token: scale = max |x| / 127, q = round(x / scale), K a multiple of 64.
//
// TOKENS 0: in the order in which the lanes of skinny.cu read them. Within 64 columns, column 32 h + 8 t + j goes to byte
// 16 t + 8 h + j, so that one 16-byte load serves both tensor-core steps of a lane.
//
// TOKENS > 0: in the order in which wide.cu copies them. For each block of TOKENS tokens and each step of 128 columns,
// TOKENS rows of 128 bytes, tokens past the last one zero; column 32 s + 8 t + 4 u + e becomes byte e of word t of 16-byte
// unit 2 s + u, and units of row m are exchanged by m mod 8 (the 128-byte swizzle of shared memory).
//
// One block a token. Macros: BF16; THREADS; TOKENS.

extern "C" __global__ void __launch_bounds__(THREADS)
quantize_rows(const u8* X, u8* Q, float* scales, int M, int K) {
  pdl_launch_dependents();
  __shared__ float warp_max[THREADS / 32];
  const uint4* x = (const uint4*)(X + (u64)blockIdx.x * K * 2);
  pdl_wait();
  const bool real = blockIdx.x < M;                       // not a token past the last one
  float peak = 0.f;
  for (int i = threadIdx.x; real && i < K / 8; i += THREADS) {
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
  if (real && threadIdx.x == 0) scales[blockIdx.x] = peak / 127.f;
  const float inverse = peak > 0.f ? 127.f / peak : 0.f;
  for (int i = threadIdx.x; i < K / 8; i += THREADS) {
    const uint4 v = real ? load_activations(x + i) : make_uint4(0, 0, 0, 0);
    u32 q[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const u32 pair = word(v, j >> 1);
      const int r = __float2int_rn(act_to_float(j & 1 ? pair >> 16 : pair & 0xffff) * inverse);
      q[j >> 2] |= (u32)(max(-127, min(127, r)) & 255) << (8 * (j & 3));
    }
    const int s = i >> 2, t = i & 3;                     // columns 32 s + 8 t ...
#if TOKENS
    const int row = blockIdx.x % TOKENS;
    u8* to = Q + (((u64)(blockIdx.x / TOKENS) * (K / 128) + (s >> 2)) * TOKENS + row) * 128 + t * 4;
#pragma unroll
    for (int u = 0; u < 2; u++) *(u32*)(to + (((2 * (s & 3) + u) ^ (row & 7)) << 4)) = q[u];
#else
    uint2 out;
    out.x = q[0];
    out.y = q[1];
    *(uint2*)(Q + (u64)blockIdx.x * K + (s >> 1) * 64 + t * 16 + (s & 1) * 8) = out;
#endif
  }
}
