// Activations [M, K] into the order in which wide.cu copies them: for each block of TOKENS tokens and each chunk of 64
// columns, TOKENS rows of 128 bytes, tokens past the last one zero.
//
// Column 32 h + 8 t + 4 u + 2 r + e of a chunk becomes element e of 4-byte word t of 16-byte unit 4 h + 2 u + r: the
// place where the tensor cores look for what lane t multiplies. Units of row m are exchanged by m mod 8 (the 128-byte
// swizzle of shared memory). A thread writes one unit, eight threads a row. Macros: TOKENS.

extern "C" __global__ void __launch_bounds__(128)
arrange(const u8* X, u8* out, int M, int chunks) {
  pdl_launch_dependents();
  const int i = blockIdx.x * 128 + threadIdx.x, chunk = i >> 3, unit = i & 7, token = blockIdx.y;
  pdl_wait();
  if (chunk >= chunks) return;
  uint4 v = make_uint4(0, 0, 0, 0);
  if (token < M) {
    const u32* from = (const u32*)(X + ((u64)token * chunks + chunk) * 128) + (unit >> 2) * 16 + (unit & 3);
    v = make_uint4(from[0], from[4], from[8], from[12]);
  }
  u8* row = out + (((u64)(token / TOKENS) * chunks + chunk) * TOKENS + token % TOKENS) * 128;
  *(uint4*)(row + ((unit ^ (token & 7)) << 4)) = v;
}
