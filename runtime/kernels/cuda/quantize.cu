// Activations [M, K] to int8, one scale a token, K a multiple of 64. One block a token.
// Macros: those of rows.cuh.

extern "C" __global__ void __launch_bounds__(THREADS)
quantize_rows(const uint4* X, u8* codes, float* scales, int K) {
  pdl_launch_dependents();
  __shared__ float scratch[THREADS / 32];
  pdl_wait();
  const int row = blockIdx.x;
  Row x;
#pragma unroll
  for (int u = 0; u < UNITS; u++) {
    const int i = u * THREADS + threadIdx.x;
    unpack(i < K / 8 ? load_activations(X + (u64)row * (K / 8) + i) : make_uint4(0, 0, 0, 0), x.v[u]);
  }
  store_int8(x, row, K, codes, scales, scratch);
}
