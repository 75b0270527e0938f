// RMSNorm (Zhang and Sennrich 2019) of what a block adds to the residual stream: hidden += delta, y = hidden / rms * weight.
// y is stored in 16 bits or rounded to int8 (QUANT) for the product that follows. One block a token.
// Macros: those of rows.cuh; ADD: there is a delta; QUANT.

extern "C" __global__ void __launch_bounds__(THREADS)
add_norm(uint4* hidden, const uint4* delta, const uint4* weight, u8* y, float* scales, int K, float eps) {
  pdl_launch_dependents();
  __shared__ float scratch[2][THREADS / 32];
  const int row = blockIdx.x;
  uint4 gain[UNITS];                                     // does not depend on the kernel before: on its way early
#pragma unroll
  for (int u = 0; u < UNITS; u++) {
    const int i = u * THREADS + threadIdx.x;
    gain[u] = i < K / 8 ? __ldg(weight + i) : make_uint4(0, 0, 0, 0);
  }
  pdl_wait();
  Row x;
  float sum = 0.f;
#pragma unroll
  for (int u = 0; u < UNITS; u++) {
    const int i = u * THREADS + threadIdx.x;
    const bool real = i < K / 8;
    const u64 at = (u64)row * (K / 8) + i;
    unpack(real ? load_activations(hidden + at) : make_uint4(0, 0, 0, 0), x.v[u]);
#if ADD
    float d[8];
    unpack(real ? load_activations(delta + at) : make_uint4(0, 0, 0, 0), d);
#pragma unroll
    for (int j = 0; j < 8; j++) x.v[u][j] += d[j];
    const uint4 added = pack(x.v[u]);
    unpack(added, x.v[u]);                               // what later layers will read
    if (real) hidden[at] = added;
#endif
#pragma unroll
    for (int j = 0; j < 8; j++) sum += x.v[u][j] * x.v[u][j];
  }
  const float inverse = rsqrtf(block_reduce<false>(sum, scratch[0]) / K + eps);
#pragma unroll
  for (int u = 0; u < UNITS; u++) {
    float w[8];
    unpack(gain[u], w);
#pragma unroll
    for (int j = 0; j < 8; j++) x.v[u][j] *= inverse * w[j];
    const uint4 normed = pack(x.v[u]);
#if QUANT
    unpack(normed, x.v[u]);                              // rounded as the 16-bit output is, so that both agree
#else
    const int i = u * THREADS + threadIdx.x;
    if (i < K / 8) ((uint4*)y)[(u64)row * (K / 8) + i] = normed;
#endif
  }
#if QUANT
  store_int8(x, row, K, y, scales, scratch[1]);
#endif
}
