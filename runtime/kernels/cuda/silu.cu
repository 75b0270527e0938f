// The gated activation: y [M, K] = silu(gate) * up, of gate and up side by side [M, 2 K]; 16 bits, or int8 (QUANT).
// After gated.cuh. Macros: those of rows.cuh; QUANT. Grid: M, pieces of UNITS THREADS units.

extern "C" __global__ void __launch_bounds__(THREADS)
silu_mul(const uint4* gate_up, u8* y, float* scales, int K) {
  pdl_launch_dependents();
  __shared__ float scratch[THREADS / 32];
  pdl_wait();
  const int row = blockIdx.x;
  Row x;
  uint4 from[UNITS][2];                                  // all on their way before the first is used
#pragma unroll
  for (int u = 0; u < UNITS; u++) {
    const int i = (blockIdx.y * UNITS + u) * THREADS + threadIdx.x;
#pragma unroll
    for (int k = 0; k < 2; k++) {
      from[u][k] = make_uint4(0, 0, 0, 0);
      if (i < K / 8) from[u][k] = load_activations(gate_up + (u64)row * (K / 4) + k * (K / 8) + i);
    }
  }
#pragma unroll
  for (int u = 0; u < UNITS; u++) {
    float gate[8], up[8];
    unpack(from[u][0], gate);
    unpack(from[u][1], up);
#pragma unroll
    for (int j = 0; j < 8; j++) x.v[u][j] = gated(gate[j], up[j]);
    const uint4 product = pack(x.v[u]);
#if QUANT
    unpack(product, x.v[u]);                             // rounded as the 16-bit output is, so that both agree
#else
    const int i = (blockIdx.y * UNITS + u) * THREADS + threadIdx.x;
    if (i < K / 8) ((uint4*)y)[(u64)row * (K / 8) + i] = product;
#endif
  }
#if QUANT
  store_int8(x, row, K, y, scales, scratch);
#endif
}
