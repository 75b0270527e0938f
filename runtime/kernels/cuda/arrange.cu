// Activations [M, K] into the order in which wide.cu copies them: for each block of TOKENS tokens and each chunk of 64
// columns, TOKENS rows of 128 bytes, tokens past the last one zero.
//
// Column 32 h + 8 t + 4 u + 2 r + e of a chunk becomes element e of 4-byte word t of 16-byte unit 4 h + 2 u + r: the
// place where the tensor cores look for what lane t multiplies. Units of row m are exchanged by m mod 8 (the 128-byte
// swizzle of shared memory). A thread moves 32 columns of one token. Macros: TOKENS.

extern "C" __global__ void __launch_bounds__(128)
arrange(const u8* X, u8* out, int M, int chunks) {
  pdl_launch_dependents();
  const int i = blockIdx.x * 128 + threadIdx.x;          // half chunk
  const int token = blockIdx.y, chunk = i >> 1, h = i & 1;
  pdl_wait();
  if (chunk >= chunks) return;
  uint4 v[4];
#pragma unroll
  for (int t = 0; t < 4; t++) {
    v[t] = make_uint4(0, 0, 0, 0);
    if (token < M) v[t] = load_activations(X + ((u64)token * chunks + chunk) * 128 + h * 64 + t * 16);
  }
  u8* row = out + (((u64)(token / TOKENS) * chunks + chunk) * TOKENS + token % TOKENS) * 128;
#pragma unroll
  for (int k = 0; k < 4; k++) {
    uint4 unit;
    unit.x = word(v[0], k);
    unit.y = word(v[1], k);
    unit.z = word(v[2], k);
    unit.w = word(v[3], k);
    *(uint4*)(row + (((4 * h + k) ^ (token & 7)) << 4)) = unit;
  }
}
