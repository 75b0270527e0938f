// Token ids of a step: those that the host knows, and those that the step before has sampled.
// tokens[i] = source[i] < 0 ? given[i] : sampled[source[i]]; a sampled -1 (no token) becomes 0. Threads: 256.

extern "C" __global__ void __launch_bounds__(256)
feed(const int* given, const int* source, const int* sampled, int* tokens, int count) {
  pdl_launch_dependents();
  pdl_wait();
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i < count) tokens[i] = source[i] < 0 ? given[i] : max(0, sampled[source[i]]);
}
