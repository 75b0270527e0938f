// y [M, N] = x [M, K] @ weight.T for more than a handful of tokens, with 16-bit or int8 activations, on Hopper.
//
// A thread each of three warps brings steps of COLUMNS columns into a ring of STAGES in shared memory with the tensor copy
// engine: activations as they lie in memory, codes, group scales with zero points. CW warpgroups of 64 rows of the weight each
// make fragments of a part of a step in registers (the A operand) while the part before multiplies, and wgmma reads TOKENS
// tokens from shared memory. Codes lie so that ldmatrix hands each lane what it multiplies (layout.py).
//
// SPLIT blocks of a cluster each take a share of K; each sends the others its partial sums of the tokens that they finish, into
// their shared memory, without atomics.
// SPLIT 1: blocks take tiles in turn and share what is left of the last round evenly, step by step (Stream-K, Osama et al.
// 2023, arXiv 2301.03598); copies are ahead of the products across tiles.
//
// 16-bit activations: group scales multiply the weights in the activations' type, sums are float32. What bounds it: issue slots
// up to about 64 tokens (123 instructions of a warp for a step, 75 of which make weights), then power.
//
// Int8 activations: sums are exact within a scale group, then float32. PROGRESSIVE: every 4-bit weight is brought to its row's
// largest scale and rounded to 8 bits, so that one exact sum serves the row (progressive group quantization: Lin et al. 2024,
// arXiv 2405.04532, here with ratios that are not whole numbers).
//
// GATED: half of a block's rows are of gate, half the same of up, and it leaves silu(gate) * up.
//
// Macros: WEIGHT_BITS; ACT_BITS 16 | 8 (8: 8-bit weights are symmetric); BF16; SCALE_BF16; GROUP; ASYM; GATED as in skinny.cu;
//   PROGRESSIVE (ACT_BITS 8, WEIGHT_BITS 4 and a GROUP alone); FUSED (ACT_BITS 16: per channel, or symmetric with powers D):
//   codes become weights in one instruction; CW 2 .. 4; TOKENS: of a tile, as WIDTH in hopper.cuh; SPLIT; COLUMNS: of one or two
//   BOXES, of one with int8 activations; STAGES; BLOCKS and LAUNCHES: the most of them that share tiles. After hopper.cuh and
//   gated.cuh.

#define UNROLL _Pragma("unroll")
#define LOADS (WEIGHT_BITS / 4)                          // 16-byte units of a lane for 16 rows of 64 columns
#define INT8 (ACT_BITS == 8)
#define SLICE (INT8 ? 32 : 16)                           // columns of a matrix instruction
#define BOX (4 * SLICE)                                  // columns of 128 bytes of a token, in which copies come
#define BOXES (COLUMNS / BOX)                            // of a step
#define CHUNKS (COLUMNS / 64)                            // of a step
#define SCALES (GROUP && GROUP < COLUMNS ? COLUMNS / (GROUP ? GROUP : 1) : 1)   // scale groups of a step, at least one
#define TILES (4 * CW)                                   // of 16 rows, one a warp
#define ROWS (64 * CW)
#define SIDES (GATED ? 2 : 1)                            // of a block's tiles: those of gate, the same of up
#define WIDTH_ROWS (ROWS / SIDES)                        // of the result
#define THREADS (128 * CW + 128)
#define COPIES (2 + (GROUP != 0))                        // kinds of them, each brought by a warp
#define BOX_X (TOKENS * 128)                             // bytes
#define CHUNK_CODES (TILES * 512 * LOADS)
#define SCALE_BYTES (GROUP ? TILES * 32 * SCALES : 0)    // of a step
#define ZERO_BYTES (GROUP && ASYM ? TILES * 16 * SCALES : 0)
#define ROUND(BYTES) (((BYTES) + 127) / 128 * 128)       // where a copy may begin
#define ROOM(BYTES) (2 * ROUND(BYTES / 2))               // of a step, where each side's copy may
#define RING (STAGES * (BOXES * BOX_X + CHUNKS * CHUNK_CODES + ROOM(SCALE_BYTES) + ROOM(ZERO_BYTES)))
#define SUMS_BY_GROUP (INT8 && GROUP && !PROGRESSIVE)    // sums of a scale group apart from those of all
// Slices that are made at a time: as many as registers hold twice, and as was faster.
#define SLICES (BOXES == 2 && CW == 3 && TOKENS <= 64 ? 8 : CW == 4 && TOKENS > 64 ? 2 : 4)
#define PARTS (COLUMNS / (SLICE * SLICES))               // of a step
#define RUNS (GROUP && GROUP < SLICE * SLICES ? SLICE * SLICES / (GROUP ? GROUP : 1) : 1)   // of a part, that share a scale
// Whether codes are fetched before the step before is waited for; wide tiles leave few stages, which it has to give back first.
#define FETCH_EARLY (!INT8 || CW > 2 || TOKENS < 128)
#define POWER (BF16 ? 64.f : 512.f)                     // by which weights are divided without scale groups
// Of what fragments hold.
#define UNIT (INT8 && WEIGHT_BITS == 4 && !ASYM && !PROGRESSIVE ? 0.0625f : FUSED && !GROUP ? POWER : 1.f)
#if SUMS_BY_GROUP
typedef float Sum;
#else
typedef Partial Sum;
#endif
#define OWN ((TOKENS / 8 + SPLIT - 1) / SPLIT)           // times 8 tokens that a block finishes, of a tile
#if SPLIT > 1
#define TURN_TOKENS (OWN * 8)                            // that leave at a time
#define OUT_BYTES ((SPLIT - 1) * OWN * 2048)             // of a warpgroup: the others' sums, then results
#else
#define TURN_TOKENS (TOKENS % 64 == 0 && TOKENS < 256 ? 64 : TOKENS % 32 ? 16 : 32)
                                                         // 256 leave no room for results of 64 beside three steps
#define OUT_BYTES (TURN_TOKENS * 128)
#endif

// Warps that copy give most of their registers to those that multiply: together no more than the kernel starts with.
#define MORE_REGISTERS asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CW == 2 ? 232 : CW == 3 ? 160 : 112));
#define LESS_REGISTERS asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(CW == 2 ? 40 : 32));

DEVICE uint4 load_shared(u32 at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
  return v;
}
[[maybe_unused]] DEVICE u32 load_word(u32 at) { u32 v; asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at)); return v; }
[[maybe_unused]] DEVICE u32 load_pair(u32 at) { u16 v; asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(at)); return v; }
// Four matrices of 8 rows of 16 bytes: lane 4 i + v gets word v of row i of each; lane i gives the address of row i % 8 of
// matrix i / 8.
DEVICE void load_matrices(u32 at, u32 (&v)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(at));
}
// Two or four 8 x 8 matrices of 16-bit numbers, transposed.
DEVICE void store_transposed(u32 at, const u32 (&v)[2]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(at), "r"(v[0]), "r"(v[1]) : "memory");
}
DEVICE void store_transposed(u32 at, const u32 (&v)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(at), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
}
DEVICE void sync_warpgroup(int group) { asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory"); }
// A warpgroup waits for the one before it, which passes on without waiting.
DEVICE void meet_warpgroups(int group) { asm volatile("bar.sync %0, 256;" ::"r"(group + 8) : "memory"); }
DEVICE void pass_warpgroups(int group) { asm volatile("bar.arrive %0, 256;" ::"r"(group + 8) : "memory"); }
// A warp waits for what a warpgroup has stored, which goes on.
DEVICE void meet_stores(int group) { asm volatile("bar.sync %0, 160;" ::"r"(group + 12) : "memory"); }
DEVICE void pass_stores(int group) { asm volatile("bar.arrive %0, 160;" ::"r"(group + 12) : "memory"); }
// A sum on its way through memory that is meant for floats, and back.
DEVICE float as_float(float sum) { return sum; }
[[maybe_unused]] DEVICE float as_float(int sum) { return __int_as_float(sum); }
[[maybe_unused]] DEVICE void add(float& sum, float v) { sum += v; }
[[maybe_unused]] DEVICE void add(int& sum, float v) { sum += __float_as_int(v); }
#if SPLIT > 1
DEVICE u32 bits(float v) { return __float_as_uint(v); }
DEVICE u32 bits(int v) { return (u32)v; }
// Four sums into another block's shared memory; its barrier counts their bytes as they arrive.
DEVICE void send(u32 to, const Sum (&v)[4], u32 barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];"
               ::"r"(to), "r"(bits(v[0])), "r"(bits(v[1])), "r"(bits(v[2])), "r"(bits(v[3])), "r"(barrier) : "memory");
}
#endif

// One warp's weights of a step: of 64 columns each, words v of the lanes 4 g + t, t < 4, of its rows g and g + 8 (layout.py).
struct Weights {
  u32 codes[CHUNKS][LOADS][4];
#if GROUP
  u32 scale[SCALES];
#endif
#if ASYM
  u32 zero[SCALES];
#endif
#if PROGRESSIVE
  u32 ratio[SCALES][2];                                  // of rows g and g + 8 to the row's unit, twice, in float16
#endif
#if FUSED && (BF16 || SCALE_BF16)
  float shift[2];                                        // 2^12 over the power of rows g and g + 8, see factors
#elif FUSED
  u32 shift;
#endif
};

#if PROGRESSIVE
// Four codes of each of two rows less their zero points (low, high: as in common.cuh), times a ratio, rounded to bytes.
DEVICE void rescale(u32 q, const u32 (&ratio)[2], u32 low, u32 high, u32 (&f)[2]) {
  u32 even, odd;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(even) : "r"(q), "r"(0x000f000fu), "r"(0x64086408u));     // 1024 + code
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(odd) : "r"(q >> 8), "r"(0x000f000fu), "r"(0x64086408u));
  const u32 e0 = half_fma2(half_sub2(even, low), ratio[0], 0x66006600u);     // 1536 + the byte
  const u32 o0 = half_fma2(half_sub2(odd, low), ratio[0], 0x66006600u);
  f[0] = __byte_perm(e0, o0, 0x6240);
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(even) : "r"(q), "r"(0x00f000f0u), "r"(0x64806480u));     // 1024 + 16 code
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(odd) : "r"(q >> 8), "r"(0x00f000f0u), "r"(0x64806480u));
  const u32 e1 = half_fma2(half_fma2(even, 0x2c002c00u, high), ratio[1], 0x66006600u);
  const u32 o1 = half_fma2(half_fma2(odd, 0x2c002c00u, high), ratio[1], 0x66006600u);
  f[1] = __byte_perm(e1, o1, 0x6240);
}
DEVICE u32 half_twice(float v) { u32 r; asm("cvt.rn.f16x2.f32 %0, %1, %1;" : "=r"(r) : "f"(v)); return r; }
#endif

#if FUSED
// A code alone in its half of a word is a number: itself in the smallest units of the activations' type, 16 times that from bit 4
// on. One fused multiply-add brings it to its weight, rounded once: times a factor, less the zero point at the weight's scale.
// For factors to be numbers of that type, weights come divided by a power of two: with scale groups by their row's own
// (layout.py), else by POWER.
struct Factors { u32 of[2], zero[2]; };                  // of rows g and g + 8, twice

// One half of a word twice; the assembler makes it a part of the instruction that uses it.
DEVICE u32 half_of(u32 pair, int k) {
  u32 r;
  if (k)
    asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %1;\nmov.b32 %0, {b, b};\n}" : "=r"(r) : "r"(pair));
  else
    asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %1;\nmov.b32 %0, {a, a};\n}" : "=r"(r) : "r"(pair));
  return r;
}

// Of a scale group of a step.
DEVICE Factors factors(const Weights& w, [[maybe_unused]] int group) {
  Factors r;
  const float row_8 = WEIGHT_BITS == 4 ? 1.f / 16 : 1.f;   // a code of row g + 8 starts at bit 4
#if !GROUP
  const float units = BF16 ? 0x1p127f : 0x1p15f;
  r.of[0] = twice(units);
  r.of[1] = twice(units * row_8);
#if ASYM
  UNROLL for (int k = 0; k < 2; k++) r.zero[k] = twice((float)(w.zero[0] >> 8 * k & 255) * (-1.f / POWER));
#else
  r.zero[0] = r.zero[1] = twice((1 << (WEIGHT_BITS - 1)) * (-1.f / POWER));
#endif
#else
  const float middle = (1 << (WEIGHT_BITS - 1)) * -0x1p-12f;
#if !BF16 && !SCALE_BF16
  const u32 scale = mul2(w.scale[group], w.shift), of = mul2(scale, floats_to_acts(0x1p12f, 0x1p12f * row_8));
  const u32 zero = mul2(scale, twice(middle));
  UNROLL for (int k = 0; k < 2; k++) {
    r.of[k] = half_of(of, k);
    r.zero[k] = half_of(zero, k);
  }
#else
  UNROLL for (int k = 0; k < 2; k++) {
    const float s = scale_of(w.scale[group], k) * w.shift[k];
    r.of[k] = twice(s * ((BF16 ? 0x1p121f : 0x1p12f) * (k ? row_8 : 1.f)));
    r.zero[k] = twice(s * middle);
  }
#endif
#endif
  return r;
}
#elif !INT8
// Two codes less their zero points, times the scale of row g (row = 0) or g + 8 (1) of a pair.
DEVICE u32 scaled(u32 codes, u32 scales, int row) {
#if SCALE_BF16 == BF16
  const u32 s = row ? scales >> 16 : scales & 0xffff;
  return mul2(codes, s | (s << 16));
#elif BF16
  return mul2(codes, twice(scale_of(scales, row)));
#else                                                    // as float16 a small scale alone may have no room for all its bits
  const float s = scale_of(scales, row);
  const bool small = fabsf(s) < 512.f;
  return mul2(mul2(codes, twice(small ? 0x1p-6f : 1.f)), twice(small ? s * 0x1p6f : s));
#endif
}
#endif

// The i-th SLICE columns of a step.
#if INT8
DEVICE void make_fragment(const Weights& w, int i, u32 (&f)[4]) {
  [[maybe_unused]] const int n = i >> 1, t = 2 * (i & 1), group = i * SLICE * SCALES / COLUMNS;
#if WEIGHT_BITS == 8
  UNROLL for (int k = 0; k < 4; k++) f[k] = w.codes[n][k & 1][t + (k >> 1)];
#else
  const u32 q0 = w.codes[n][0][t], q1 = w.codes[n][0][t + 1];
#if PROGRESSIVE
#if ASYM
  const u32 z0 = 0x64006400u | (w.zero[group] & 255) * 0x00010001u, z1 = 0x64006400u | (w.zero[group] >> 8) * 0x00010001u;
#else
  const u32 z0 = 0x64086408u, z1 = z0;
#endif
  const u32 high = half_sub2(0x63806380u, z1);           // -(64 + zero)
  u32 pair[2];
  rescale(q0, w.ratio[group], z0, high, pair);
  f[0] = pair[0];
  f[1] = pair[1];
  rescale(q1, w.ratio[group], z0, high, pair);
  f[2] = pair[0];
  f[3] = pair[1];
#elif ASYM                                               // code - zero point, byte by byte, none borrows from the next
  const u32 z0 = (w.zero[group] & 255) * 0x01010101u, z1 = (w.zero[group] >> 8) * 0x01010101u;
  const u32 u0 = q0 ^ 0x88888888u, u1 = q1 ^ 0x88888888u;
  f[0] = (((u0 & 0x0f0f0f0fu) | 0x80808080u) - z0) ^ 0x80808080u;
  f[1] = (((u0 >> 4 & 0x0f0f0f0fu) | 0x80808080u) - z1) ^ 0x80808080u;
  f[2] = (((u1 & 0x0f0f0f0fu) | 0x80808080u) - z0) ^ 0x80808080u;
  f[3] = (((u1 >> 4 & 0x0f0f0f0fu) | 0x80808080u) - z1) ^ 0x80808080u;
#else                                                    // signed nibbles as bytes of 16 times their value
  f[0] = (q0 << 4) & 0xf0f0f0f0u;
  f[1] = q0 & 0xf0f0f0f0u;
  f[2] = (q1 << 4) & 0xf0f0f0f0u;
  f[3] = q1 & 0xf0f0f0f0u;
#endif
#endif
}
#elif FUSED
DEVICE void make_fragment(const Weights& w, int i, u32 (&f)[4]) {
  const int n = i / 4, s = i % 4, t = 2 * (s & 1);
  const Factors by = factors(w, i * SLICE * SCALES / COLUMNS);
  UNROLL for (int k = 0; k < 4; k++) {
#if WEIGHT_BITS == 4
    const u32 code = w.codes[n][0][t + (k >> 1)] >> 8 * (s >> 1) & (k & 1 ? 0x00f000f0u : 0x000f000fu);
#else
    const u32 code = __byte_perm(w.codes[n][s >> 1][t + (k >> 1)], 0, k & 1 ? 0x4342 : 0x4140);
#endif
    f[k] = fma2(code, by.of[k & 1], by.zero[k & 1]);
  }
}
#else
DEVICE void make_fragment(const Weights& w, int i, u32 (&f)[4]) {
  const int n = i / 4, s = i % 4, t = 2 * (s & 1), group = i * SLICE * SCALES / COLUMNS;
#if ASYM
  const ZeroPoint z0 = zero_point(w.zero[group] & 255), z1 = zero_point(w.zero[group] >> 8);
#else
  const ZeroPoint z0 = zero_point(1u << (WEIGHT_BITS - 1)), z1 = z0;
#endif
#if WEIGHT_BITS == 4
  const int shift = 8 * (s >> 1);
  pairs_to_acts(w.codes[n][0][t] >> shift, w.codes[n][0][t + 1] >> shift, z0, z1, f);
#else
  bytes_to_acts(w.codes[n][s >> 1][t], z0, z1, f[0], f[1]);
  bytes_to_acts(w.codes[n][s >> 1][t + 1], z0, z1, f[2], f[3]);
#endif
  UNROLL for (int k = 0; k < 4; k++) f[k] = scaled(f[k], w.scale[group], k & 1);
}
#endif

#if GATED
// Of two pairs of gate and of up, as silu.cu would.
DEVICE u32 gated_pair(u32 gate, u32 up) {
  return floats_to_acts(gated(act_to_float(gate), act_to_float(up)), gated(act_to_float(gate >> 16), act_to_float(up >> 16)));
}
#endif

// Where the tiles left over after `rounds` tiles of every block are cut, counted in steps: the part of `block` begins here.
DEVICE int part_begins(int block, int all, int tiles, int rounds) {
  return (int)((long long)max(0, tiles - rounds * (int)gridDim.y) * all * block / (int)gridDim.y);
}

// Steps [begin, end) of a tile.
struct Share { int tile, begin, end; };

// The n-th share of this block: a whole tile (all: its steps) in each round, then what its part has of one tile after another.
// Empty past the last.
DEVICE Share nth_share(int n, int all, int tiles, int rounds) {
  const int tile = blockIdx.y + n * gridDim.y;
  if (n < rounds) return {tile, 0, tile < tiles ? all : 0};
  const int first = part_begins(blockIdx.y, all, tiles, rounds), last = part_begins(blockIdx.y + 1, all, tiles, rounds);
  const int left = first / all + n - rounds;             // tile of those left over
  return {rounds * (int)gridDim.y + left, max(0, first - left * all), min(all, last - left * all)};
}

DEVICE u32 load_acquire(const u32* p) {
  u32 v; asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v;
}
DEVICE void store_release(u32* p, u32 v) { asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
// Another block wrote it: not from L1.
DEVICE float4 load_partial(const float4* p) {
  float4 v;
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p) : "memory");
  return v;
}

// What the tensor copy engine reads: x [M, 64 chunks] in boxes of TOKENS by BOX, as 16-bit words; the weight's codes, scales and
// zero points as in skinny.cu, a row for every tile of 16, in boxes of TILES / SIDES rows and 64 columns (codes) or SCALES
// groups. Past the last column all are zeros.
struct Maps { TensorMap x, codes, scales, zeros; };

#if SPLIT == 1
// Whether a warpgroup has left its sums, by launch (those of a kernel take turns) and block; zeros after the launch again.
__device__ u32 sums_are_left[LAUNCHES][BLOCKS][CW];
#endif

// S: float [N] per channel (GROUP 0), or group scales; Z: zero points per channel; D: float [16 tiles], powers of rows (FUSED);
// XS: float [M], of int8 activations. Grid: (SPLIT, tiles) or (1, blocks), all of which run at once. P: room for the sums of
// every block where tiles are shared, [blocks, CW, TOKENS / 8, 128, 4]; turn: which LAUNCH.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
gemm(const void* __restrict__ S, const u16* __restrict__ Z, const float* __restrict__ D, const float* XS, u16* Y, float4* P,
     int M, int N, int chunks, int rounds, int turn, const __grid_constant__ Maps maps) {
  pdl_launch_dependents();
  extern __shared__ __align__(1024) u8 shared[];         // the ring; the cluster's sums, results on their way
  __shared__ __align__(8) u64 full[STAGES], empty[STAGES];
#if SPLIT > 1
  __shared__ __align__(8) u64 arrived[CW];               // the others' sums for a warpgroup
#endif
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);   // known to be the same in a warp
  const int rank = SPLIT > 1 ? blockIdx.x : 0;
  const int width = N / SIDES, token_tiles = (M + TOKENS - 1) / TOKENS;
  const int tiles = (width + WIDTH_ROWS - 1) / WIDTH_ROWS * token_tiles;
  const int all = (chunks + CHUNKS - 1) / CHUNKS;        // steps of a tile
  int number = 0;
  Share share = {(int)blockIdx.y, all * rank / SPLIT, all * (rank + 1) / SPLIT};
  auto take = [&]() {                                    // the next share, if there is one
    if (SPLIT > 1) return number++ == 0;
    share = nth_share(number++, all, tiles, rounds);
    return share.begin < share.end;
  };
  const u32 acts = (u32)__cvta_generic_to_shared(shared), codes = acts + STAGES * BOXES * BOX_X;
  [[maybe_unused]] const u32 scales = codes + STAGES * CHUNKS * CHUNK_CODES, zeros = scales + STAGES * ROOM(SCALE_BYTES);
  u32 full_at = (u32)__cvta_generic_to_shared(full), empty_at = (u32)__cvta_generic_to_shared(empty);
#if SPLIT > 1
  const u32 arrived_at = (u32)__cvta_generic_to_shared(arrived);
#endif
  asm volatile("" : "+r"(full_at), "+r"(empty_at));      // not to be worked out again and again
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(full_at + 8 * i, COPIES);
      barrier_init(empty_at + 8 * i, TILES);
    }
#if SPLIT > 1
    for (int i = 0; i < CW; i++) {
      barrier_init(arrived_at + 8 * i, 1);
      barrier_expect(arrived_at + 8 * i, (SPLIT - 1) * 2048 * max(0, min(OWN, TOKENS / 8 - rank * OWN)));
    }
#endif
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if (warp >= TILES && lane == 0 && warp - TILES < 2 + (GROUP != 0) + (GROUP && ASYM)) tensor_prefetch((&maps.x)[warp - TILES]);
  __syncthreads();
  if (SPLIT > 1) cluster_arrive();
  int stage = 0, phase = 0;                              // of the next step to copy, or to fetch
  auto advance = [&]() {
    if (++stage == STAGES) { stage = 0; phase ^= 1; }
  };

  if (warp >= TILES) {
    LESS_REGISTERS
    const int kind = warp - TILES;                       // of what this warp copies
    if (lane == 0 && kind < COPIES) {
      if (kind == 0) pdl_wait();                         // the weights are there already
      while (take()) {
        const int token = share.tile % token_tiles * TOKENS, row = share.tile / token_tiles * (TILES / SIDES);
        for (int step = share.begin; step < share.end; step++) {
          const u32 barrier = full_at + 8 * stage;
          [[maybe_unused]] const int group = step * COLUMNS / (GROUP ? GROUP : 1) * 8;
          barrier_wait(empty_at + 8 * stage, phase ^ 1);
          if (kind == 0) {
            barrier_expect(barrier, BOXES * BOX_X);
            UNROLL for (int n = 0; n < BOXES; n++)
              tensor_copy(acts + (stage * BOXES + n) * BOX_X, maps.x, (step * BOXES + n) * 64, token, barrier);
          } else if (kind == 1) {
            barrier_expect(barrier, CHUNKS * CHUNK_CODES);
            UNROLL for (int n = 0; n < CHUNKS; n++)
              UNROLL for (int side = 0; side < SIDES; side++)
                tensor_copy(codes + (stage * CHUNKS + n) * CHUNK_CODES + side * (CHUNK_CODES / 2), maps.codes,
                            (step * CHUNKS + n) * (LOADS * 128), row + side * (width >> 4), barrier);
#if GROUP
          } else {
            barrier_expect(barrier, SCALE_BYTES + ZERO_BYTES);
            UNROLL for (int side = 0; side < SIDES; side++) {
              tensor_copy(scales + stage * ROOM(SCALE_BYTES) + side * ROUND(SCALE_BYTES / 2), maps.scales, group,
                          row + side * (width >> 4), barrier);
#if ASYM
              tensor_copy(zeros + stage * ROOM(ZERO_BYTES) + side * ROUND(ZERO_BYTES / 2), maps.zeros, group,
                          row + side * (width >> 4), barrier);
#endif
            }
#endif
          }
          advance();
        }
      }
    }
    __syncwarp();
    if (SPLIT > 1) cluster_wait();
#if SPLIT == 1
    if (kind == 3)                                       // tells of sums that were left when they are in memory
      while (take())
        for (int group = 0; group < CW && share.begin > 0; group++) {
          meet_stores(group);
          if (lane == 0) store_release(&sums_are_left[turn][blockIdx.y][group], 1);
          __syncwarp();
        }
#endif
    return;
  }

  MORE_REGISTERS
  [[maybe_unused]] const int g = lane >> 2, t = lane & 3, warpgroup = warp >> 2;
  // Two warps of a warpgroup have tiles of gate, the other two the same of up: which tile of its side, which of the block.
  const int side = GATED ? warp >> 1 & 1 : 0, place = GATED ? 2 * warpgroup + (warp & 1) : warp;
  const int slot = side * (TILES / 2) + place;
  // Of a matrix's row: unit (g = lane % 8, t = lane / 8) of 16 bytes, where layout.py put it.
  u32 unit = codes + slot * (512 * LOADS) + (lane >> 1 & 3) * 128 +
             ((((lane & 1) * 4 + (lane >> 3)) ^ (lane >> 1 & 3)) << 4);
  [[maybe_unused]] u32 pair = scales + side * ROUND(SCALE_BYTES / 2) + (place * SCALES * 8 + g) * 4;
  [[maybe_unused]] u32 zero_pair = zeros + side * ROUND(ZERO_BYTES / 2) + (place * SCALES * 8 + g) * 2;
  const u32 first_operand = (acts >> 4) | (1u << 16);    // low word of a descriptor: 32 bytes of a token, K contiguous
  asm volatile("" : "+r"(unit), "+r"(pair), "+r"(zero_pair));
  auto operand = [&](int stage, int i) {                 // 1024 bytes from 8 tokens to the next 8, 128-byte swizzle
    const u64 first = (u64)(first_operand + stage * BOXES * (BOX_X / 16)) | (64ull << 32) | (1ull << 62);
    return first + (i / 4 * (BOX_X / 16) + i % 4 * 2);   // one addition of 64 bits each
  };
  auto release = [&](int stage) {                        // this warp has done with it
    if (lane == 0) barrier_arrive(empty_at + 8 * stage);
  };
  [[maybe_unused]] auto row_tile = [&](const Share& share) {   // of this warp
    return min((share.tile / token_tiles * WIDTH_ROWS + side * width) / 16 + place, (N - 1) >> 4);
  };
#if FUSED && GROUP
  float powers[2];                                       // of rows g and g + 8 of the next tile
  auto load_powers = [&](const Share& share) {
    UNROLL for (int k = 0; k < 2; k++) powers[k] = __ldg(D + row_tile(share) * 16 + g + 8 * k);
  };
  load_powers(SPLIT > 1 ? share : nth_share(0, all, tiles, rounds));
#endif
  pdl_wait();
  // Where blocks take several tiles, warpgroups start a part of a step apart: then not all of them store results at once.
  const bool apart = SPLIT == 1 && tiles > (int)gridDim.y;
#if PROGRESSIVE
  const int groups = chunks * 64 / GROUP;
#endif
  while (take()) {
    if (apart && warpgroup > 0 && number == 1) meet_warpgroups(warpgroup);
    const int first_row = share.tile / token_tiles * WIDTH_ROWS, first_token = share.tile % token_tiles * TOKENS;
    const int steps = share.end - share.begin;
    Weights w;                                           // of the next step
#if ASYM && !GROUP
    w.zero[0] = __ldg(Z + row_tile(share) * 8 + g);
#endif
#if FUSED && GROUP
    float gain[2] = {powers[0], powers[1]};              // of rows g and g + 8
    auto shift = [](float power) { return __uint_as_float(0x85000000u - __float_as_uint(power)); };   // 2^12 / power
#if BF16 || SCALE_BF16
    UNROLL for (int k = 0; k < 2; k++) w.shift[k] = shift(powers[k]);
#else
    w.shift = floats_to_acts(shift(powers[0]), shift(powers[1]));
#endif
    if (SPLIT == 1) load_powers(nth_share(number, all, tiles, rounds));
#else
    float gain[2] = {UNIT, UNIT};
#endif
#if PROGRESSIVE
    gain[0] = gain[1] = 0.f;                             // the row's largest weight becomes 127
    for (int k = t; k < groups; k += 4) {
      const u32 at = (u32)row_tile(share) * groups * 8 + k * 8 + g, scale = __ldg((const u32*)S + at);
#if ASYM
      const int zeros = __ldg(Z + at), z0 = zeros & 255, z1 = zeros >> 8;
      const float most0 = (float)max(z0, 15 - z0), most1 = (float)max(z1, 15 - z1);
#else
      const float most0 = 8.f, most1 = 8.f;
#endif
      gain[0] = fmaxf(gain[0], fabsf(scale_of(scale, 0)) * most0);
      gain[1] = fmaxf(gain[1], fabsf(scale_of(scale, 1)) * most1);
    }
    UNROLL for (int k = 0; k < 2; k++) {
      gain[k] = fmaxf(gain[k], __shfl_xor_sync(~0u, gain[k], 1));
      gain[k] = fmaxf(gain[k], __shfl_xor_sync(~0u, gain[k], 2)) * (1.f / 127.f);
    }
    const float per_unit[2] = {gain[0] > 0.f ? 1.f / gain[0] : 0.f, gain[1] > 0.f ? 1.f / gain[1] : 0.f};
    if (SPLIT == 1) {                                    // those of the next tile into the L2 cache
      const Share coming = nth_share(number, all, tiles, rounds);
      for (int i = lane * 128; coming.begin < coming.end && i < groups * 32; i += 32 * 128)
        asm volatile("prefetch.global.L2 [%0];" ::"l"((const u8*)S + (u64)row_tile(coming) * groups * 32 + i));
    }
#endif
    auto fetch = [&]() {
      barrier_wait(full_at + 8 * stage, phase);
      UNROLL for (int k = 0; k < CHUNKS * LOADS; k++)
        load_matrices(unit + (stage * CHUNKS + k / LOADS) * CHUNK_CODES + k % LOADS * 512, w.codes[k / LOADS][k % LOADS]);
      UNROLL for (int k = 0; k < SCALES; k++) {
#if GROUP
        w.scale[k] = load_word(pair + stage * ROOM(SCALE_BYTES) + k * 32);
#if ASYM
        w.zero[k] = load_pair(zero_pair + stage * ROOM(ZERO_BYTES) + k * 16);
#endif
#if PROGRESSIVE
        UNROLL for (int row = 0; row < 2; row++) w.ratio[k][row] = half_twice(scale_of(w.scale[k], row) * per_unit[row]);
#endif
#endif
      }
      advance();
    };
    // The assembler takes registers for free that the tensor cores still read (test_wgmma_registers.py). Zero, but only we know:
    [[maybe_unused]] const u32 never = (u32)M >> 31;
    [[maybe_unused]] auto hold = [&](const u32 (&part)[SLICES][4]) {   // until here, by a store that is not made
      UNROLL for (int s = 0; s < SLICES; s++)
        asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %4, 0;\n@p st.shared.v4.u32 [%5], {%0, %1, %2, %3};\n}"
                     ::"r"(part[s][0]), "r"(part[s][1]), "r"(part[s][2]), "r"(part[s][3]), "r"(never), "r"(acts) : "memory");
    };
    u32 a[2][SLICES][4];                                 // one part multiplies while the next one is made
#if !FETCH_EARLY
    UNROLL for (int s = 0; s < SLICES; s++)
      UNROLL for (int k = 0; k < 4; k++) a[1][s][k] = 0;
#endif
    auto make = [&](u32 (&part)[SLICES][4], int first) {
      UNROLL for (int s = 0; s < SLICES; s++) {
        make_fragment(w, first + s, part[s]);
#if INT8 && WEIGHT_BITS == 8                             // or ldmatrix would write into them itself, before it may
        UNROLL for (int k = 0; k < 4; k++) part[s][k] ^= never;
#endif
        UNROLL for (int k = 0; k < 4; k++) asm volatile("" : "+r"(part[s][k]));   // now: the tensor cores are busy
      }
    };
    Sum sum[TOKENS / 8][4];
    UNROLL for (int j = 0; j < TOKENS / 8; j++)
      UNROLL for (int k = 0; k < 4; k++) sum[j][k] = 0;
    int now = stage;                                     // the stage of this step
    if (steps > 0) {
      fetch();
      make(a[0], 0);
    }
    if (apart && warpgroup + 1 < CW && number == 1) pass_warpgroups(warpgroup + 1);
#if SUMS_BY_GROUP
    Partial exact[TOKENS / 8][4];                        // sums of one scale group
    auto add_exact = [&](u32 pair) {                     // times the group's scales
      const float s0 = scale_of(pair, 0), s1 = scale_of(pair, 1);
      UNROLL for (int j = 0; j < TOKENS / 8; j++)
        UNROLL for (int e = 0; e < 4; e++) sum[j][e] += (e < 2 ? s0 : s1) * (float)exact[j][e];
    };
    auto multiply = [&](const u32 (&part)[SLICES][4]) {  // leaves its last run under way: the scales of that
      u32 pair = 0;
      UNROLL for (int s = 0; s < SLICES; s++) {
        if (s % (SLICES / RUNS) == 0) {
          if (s > 0) {
            wgmma_wait_for<0>(exact);
            add_exact(pair);
          }
          pair = w.scale[s * SLICE * SCALES / COLUMNS];
          wgmma_fence();
          wgmma<false>(exact, part[s], operand(now, s));
        } else {
          wgmma(exact, part[s], operand(now, s));
        }
        if ((s + 1) % (SLICES / RUNS) == 0) wgmma_commit();
      }
      return pair;
    };
    auto step = [&](int i, const u32 (&mine)[SLICES][4], u32 (&next)[SLICES][4]) {
      const u32 pair = multiply(mine);
      const int current = now;
      now = stage;
      if (i + 1 < steps) fetch();
      make(next, 0);                                     // past the last step of no use, and no harm
      wgmma_wait_for<0>(exact);
      release(current);
      add_exact(pair);
    };
    for (int i = 0; i < steps; i += 2) {
      step(i, a[0], a[1]);
      if (i + 1 < steps) step(i + 1, a[1], a[0]);
    }
#else
    int before = now;                                    // the stage of the step before
    auto multiply = [&](int stage, const u32 (&part)[SLICES][4], int first) {
      wgmma_fence();
      UNROLL for (int s = 0; s < SLICES; s++) wgmma(sum, part[s], operand(stage, first + s));
      wgmma_commit();
    };
#if PARTS == 1
    auto step = [&](int i, const u32 (&mine)[SLICES][4], u32 (&next)[SLICES][4]) {
      multiply(now, mine, 0);
      const int after = stage;
      if (FETCH_EARLY && i + 1 < steps) fetch();
      wgmma_wait<1>();                                   // the step before
      if (i > 0) release(before);
      if (!FETCH_EARLY) {
        hold(next);
        if (i + 1 < steps) fetch();
      }
      make(next, 0);                                     // past the last step of no use, and no harm
      before = now;
      now = after;
    };
    for (int i = 0; i < steps; i += 2) {
      step(i, a[0], a[1]);
      if (i + 1 < steps) step(i + 1, a[1], a[0]);
    }
#else
    for (int i = 0; i < steps; i++) {
      multiply(now, a[0], 0);
      wgmma_wait<1>();                                   // the step before
      if (i > 0) release(before);
      make(a[1], SLICES);
      multiply(now, a[1], SLICES);
      before = now;
      now = stage;
      if (i + 1 < steps) fetch();
      wgmma_wait<1>();                                   // the first half
      make(a[0], 0);                                     // past the last step of no use, and no harm
    }
#endif
    wgmma_wait_for<0>(sum);
    if (SPLIT == 1) release(before);
#endif
#if !GROUP
    UNROLL for (int k = 0; k < 2; k++)
      gain[k] *= __ldg((const float*)S + min(first_row + side * width + place * 16 + g + 8 * k, N - 1));
#endif

#if SPLIT > 1
    const u32 results = acts + RING + warpgroup * OUT_BYTES, mine = (threadIdx.x & 127) * 16;
    cluster_wait();                                      // until all have their barriers
    Sum own[OWN][4];
    UNROLL for (int block = 0; block < SPLIT; block++) {
      const u32 to = at_block(results + (rank - (rank > block)) * (OWN * 2048) + mine, block);
      const u32 barrier = at_block(arrived_at + 8 * warpgroup, block);
      UNROLL for (int j = 0; j < OWN; j++) {
        if (block * OWN + j >= TOKENS / 8) continue;
        const Sum (&v)[4] = sum[block * OWN + j];
        if (block != rank) send(to + j * 2048, v, barrier);
        else UNROLL for (int k = 0; k < 4; k++) own[j][k] = v[k];
      }
    }
    barrier_wait_cluster(arrived_at + 8 * warpgroup, 0);
    UNROLL for (int other = 0; other < SPLIT - 1; other++)
      UNROLL for (int j = 0; j < OWN; j++) {
        const uint4 v = load_shared(results + (other * OWN + j) * 2048 + mine);   // of no use past the tile, and no harm
        UNROLL for (int k = 0; k < 4; k++) add(own[j][k], __uint_as_float(word(v, k)));
      }
    sync_warpgroup(warpgroup);                           // results come where these lay
    const Sum (&last)[OWN][4] = own;
    const int first = first_token + rank * TURN_TOKENS, tokens = TURN_TOKENS, end = min(M, first_token + TOKENS);
#else
    float4* parts = P + warpgroup * (TOKENS / 8 * 128) + (threadIdx.x & 127);   // of a block: every thread's own sums
    const int part = CW * (TOKENS / 8) * 128;
    if (share.begin > 0) {                               // the block that has the tile's beginning takes them from here
      UNROLL for (int j = 0; j < TOKENS / 8; j++)
        parts[blockIdx.y * part + j * 128] =
            make_float4(as_float(sum[j][0]), as_float(sum[j][1]), as_float(sum[j][2]), as_float(sum[j][3]));
      pass_stores(warpgroup);
      continue;
    }
    const int tile_end = (share.tile - rounds * (int)gridDim.y + 1) * all;
    for (int other = blockIdx.y + 1; share.end < all; other++) {
      const int begin = part_begins(other, all, tiles, rounds);
      if (begin >= tile_end) break;
      if (begin == part_begins(other + 1, all, tiles, rounds)) continue;   // has no part
      if ((threadIdx.x & 127) == 0) {
        u32* flag = &sums_are_left[turn][other][warpgroup];
        while (!load_acquire(flag)) {}
        *flag = 0;                                       // for the next launch
      }
      sync_warpgroup(warpgroup);
      UNROLL for (int j = 0; j < TOKENS / 8; j++) {
        const float4 v = load_partial(parts + other * part + j * 128);
        add(sum[j][0], v.x);
        add(sum[j][1], v.y);
        add(sum[j][2], v.z);
        add(sum[j][3], v.w);
      }
    }
    const u32 results = acts + RING + warpgroup * OUT_BYTES;
    const Sum (&last)[TOKENS / 8][4] = sum;
    const int first = first_token, tokens = TOKENS, end = M;
#endif
    UNROLL for (int c = 0; c < tokens; c += TURN_TOKENS) {
      auto finish = [&](int j, u32& low, u32& high) {    // 8 tokens of rows g and g + 8
        const Sum (&d)[4] = last[c / 8 + j];
        float x[2] = {1.f, 1.f};                         // scales of two tokens
#if INT8
        UNROLL for (int e = 0; e < 2; e++) x[e] = XS[min(first + c + j * 8 + t * 2 + e, M - 1)];
#endif
        low = floats_to_acts((float)d[0] * gain[0] * x[0], (float)d[1] * gain[0] * x[1]);
        high = floats_to_acts((float)d[2] * gain[1] * x[0], (float)d[3] * gain[1] * x[1]);
      };
      UNROLL for (int j = 0; j < TURN_TOKENS / 8; j += 2) {
        const int token = (j + (lane >> 4)) * 8 + (lane & 7), unit = (warp & 3) * 2 + (lane >> 3 & 1);
        if (j + 1 < TURN_TOKENS / 8) {
          u32 v[4];
          UNROLL for (int k = 0; k < 2; k++) finish(j + k, v[2 * k], v[2 * k + 1]);
          store_transposed(results + token * 128 + ((unit ^ (token & 7)) << 4), v);
        } else {                                         // the other lanes' addresses do not matter
          u32 v[2];
          finish(j, v[0], v[1]);
          store_transposed(results + token * 128 + ((unit ^ (token & 7)) << 4), v);
        }
      }
      sync_warpgroup(warpgroup);
      UNROLL for (int k = 0; k < (TURN_TOKENS * 8 / SIDES + 127) / 128; k++) {
        const int at = k * 128 + (threadIdx.x & 127), token = at / (8 / SIDES), unit = at % (8 / SIDES);
        if (token >= TURN_TOKENS) continue;
        const int row = first_row + warpgroup * (64 / SIDES) + unit * 8;
        auto result = [&](int unit) { return load_shared(results + token * 128 + ((unit ^ (token & 7)) << 4)); };
        uint4 v = result(unit);
#if GATED
        const uint4 up = result(unit + 4);
        v = make_uint4(gated_pair(v.x, up.x), gated_pair(v.y, up.y), gated_pair(v.z, up.z), gated_pair(v.w, up.w));
#endif
        if (first + c + token >= end) continue;
        u16* to = Y + (u64)(first + c + token) * width + row;
        if (row + 8 <= width && !(width & 7)) {
          *(uint4*)to = v;
        } else {
          UNROLL for (int e = 0; e < 8; e++)
            if (row + e < width) to[e] = (u16)(word(v, e >> 1) >> (16 * (e & 1)));
        }
      }
      sync_warpgroup(warpgroup);
    }
  }
}
