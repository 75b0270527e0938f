// Activations [M, K] to int8, one scale a token, K a multiple of 64; in which order: rows.cuh. One block a token.
// Macros: those of rows.cuh.

extern "C" __global__ void __launch_bounds__(THREADS)
quantize_rows(const uint4* X, u8* codes, float* scales, int M, int K) {
  pdl_launch_dependents();
  __shared__ float scratch[THREADS / 32];
  pdl_wait();
  const int row = blockIdx.x;
  Row x;
#pragma unroll
  for (int u = 0; u < UNITS; u++) {
    const int i = u * THREADS + threadIdx.x;
    const bool real = row < M && i < K / 8;
    unpack(real ? load_activations(X + (u64)row * (K / 8) + i) : make_uint4(0, 0, 0, 0), x.v[u]);
  }
  store_int8(x, row, M, K, codes, scales, scratch);
}
