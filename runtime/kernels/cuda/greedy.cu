// The likeliest token of each row of logits [rows, vocab] (the first of equals), -1 where any logit is NaN or the largest is
// infinite. One block a row. Macros: BF16; THREADS.

extern "C" __global__ void __launch_bounds__(THREADS)
greedy(const u16* logits, int* tokens, int vocab) {
  pdl_launch_dependents();
  __shared__ float tops[THREADS / 32];
  __shared__ int places[THREADS / 32], broken[THREADS / 32];
  pdl_wait();
  const u16* row = logits + (u64)blockIdx.x * vocab;
  const float infinity = __int_as_float(0x7f800000);
  float top = -infinity;
  int place = 0x7fffffff, bad = 0;
  auto look = [&](float v, int at) {
    bad |= !(v <= infinity);
    if (v > top) { top = v; place = at; }
  };
  const int whole = vocab % 8 ? 0 : vocab / 8;           // rows that do not start on 16 bytes go one by one
  for (int i = threadIdx.x; i < whole; i += THREADS) {
    const uint4 v = load_activations((const uint4*)row + i);
#pragma unroll
    for (int j = 0; j < 8; j++) look(act_to_float(j & 1 ? word(v, j >> 1) >> 16 : word(v, j >> 1) & 0xffff), i * 8 + j);
  }
  for (int i = whole * 8 + threadIdx.x; i < vocab; i += THREADS) look(act_to_float(row[i]), i);
  auto join = [&](float other, int at) {
    if (other > top || (other == top && at < place)) { top = other; place = at; }
  };
#pragma unroll
  for (int d = 16; d; d >>= 1) {
    const float other = __shfl_xor_sync(0xffffffffu, top, d);
    const int at = __shfl_xor_sync(0xffffffffu, place, d);
    bad |= __shfl_xor_sync(0xffffffffu, bad, d);
    join(other, at);
  }
  if ((threadIdx.x & 31) == 0) {
    tops[threadIdx.x >> 5] = top;
    places[threadIdx.x >> 5] = place;
    broken[threadIdx.x >> 5] = bad;
  }
  __syncthreads();
  if (threadIdx.x) return;
  for (int i = 1; i < THREADS / 32; i++) {
    join(tops[i], places[i]);
    bad |= broken[i];
  }
  tokens[blockIdx.x] = bad || !(fabsf(top) < infinity) ? -1 : place;
}
