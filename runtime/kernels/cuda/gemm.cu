// y [M, N] = x [M, K] @ weight.T with int8 activations for hundreds of tokens and more, on Hopper's warpgroup tensor cores:
// bound by those.
//
// One block a multiprocessor, which takes tiles of 128 rows of the weight and TOKENS tokens in turn. A producer
// warpgroup brings weights and activations into a ring of STAGES steps of K by bulk copies; two warpgroups of 64 rows each make
// fragments of the weights in registers (the A operand, as in wide.cu) while the step before multiplies, and wgmma reads
// the activations from shared memory. Results leave through shared memory, transposed, in whole lines.
//
// A step is 128 columns; rows.cuh has put them into the order of the weights' columns. Sums are exact within a scale group,
// then float32. PROGRESSIVE: every 4-bit weight is brought to its row's largest scale and rounded to 8 bits, so that one sum
// serves the whole row (progressive group quantization: Lin et al. 2024, arXiv 2405.04532, here with ratios that are not
// whole numbers).
//
// Macros: WEIGHT_BITS; ACT_BITS 8; BF16; SCALE_BF16; GROUP; ASYM (WEIGHT_BITS 4 alone) as in skinny.cu; PROGRESSIVE
//   (WEIGHT_BITS 4 and a GROUP alone); TOKENS 64 | 128 | 256 of a tile; STAGES. After hopper.cuh. The weight has an even
//   number of chunks.

#define UNROLL _Pragma("unroll")
#define LOADS (WEIGHT_BITS / 4)                          // 16-byte loads of a lane for 16 rows of a chunk
#define CHUNKS 2                                         // of a step
#define COLUMNS (CHUNKS * 64)
#define SCALES (!GROUP || GROUP >= COLUMNS ? 1 : COLUMNS / (GROUP ? GROUP : 1))  // scale groups of a step
#define TILES 8                                          // of 16 rows, one a warp
#define X_BYTES (TOKENS * 128)                           // of a stage
#define W_BYTES (CHUNKS * LOADS * 512)                   // of a stage, one tile
#define STAGE_BYTES (X_BYTES + TILES * W_BYTES)
#define THREADS 384                                      // two warpgroups that multiply, one that copies
#define OUT_BYTES (64 * 128)                             // of a warpgroup: 64 tokens of its 64 rows
#define BY_GROUP (GROUP && !PROGRESSIVE)                 // sums of a scale group apart from those of all
#if BY_GROUP
typedef float Sum;
#else
typedef Partial Sum;
#endif

// One warp's weights of a step.
struct Codes { uint4 q[CHUNKS][LOADS]; };

// Scales (and zero points) of rows g and g + 8 for a step, as they lie in memory.
struct Scales {
#if GROUP
  u32 scale[SCALES];
#endif
#if PROGRESSIVE
  u32 ratio[SCALES][2];                                  // of rows g and g + 8 to the row's unit, twice, in float16
#endif
#if ASYM
  u32 zero[SCALES];
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

// Fragment s of a step: 32 bytes of a token.
DEVICE void make_fragment(const Codes& codes, const Scales& by, int s, u32 (&f)[4]) {
  [[maybe_unused]] const int group = s * SCALES / 4;
#if WEIGHT_BITS == 8
  UNROLL for (int k = 0; k < 4; k++) f[k] = word(codes.q[s >> 1][s & 1], k);
#else
  const u32 q0 = word(codes.q[s >> 1][0], 2 * (s & 1)), q1 = word(codes.q[s >> 1][0], 2 * (s & 1) + 1);
#if PROGRESSIVE
#if ASYM
  const u32 z0 = 0x64006400u | (by.zero[group] & 255) * 0x00010001u, z1 = 0x64006400u | (by.zero[group] >> 8) * 0x00010001u;
#else
  const u32 z0 = 0x64086408u, z1 = z0;
#endif
  const u32 high = half_sub2(0x63806380u, z1);           // -(64 + zero)
  u32 pair[2];
  rescale(q0, by.ratio[group], z0, high, pair);
  f[0] = pair[0];
  f[1] = pair[1];
  rescale(q1, by.ratio[group], z0, high, pair);
  f[2] = pair[0];
  f[3] = pair[1];
#elif ASYM                                               // code - zero point, byte by byte, none borrows from the next
  const u32 z0 = (by.zero[group] & 255) * 0x01010101u, z1 = (by.zero[group] >> 8) * 0x01010101u;
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

#define CODE_UNIT (WEIGHT_BITS == 4 && !ASYM && !PROGRESSIVE ? 0.0625f : 1.f)

DEVICE uint4 load_shared(u32 at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
  return v;
}
// Four 8 x 8 matrices of 16-bit numbers, transposed; lane i gives the address of row i % 8 of matrix i / 8.
DEVICE void store_transposed(u32 at, const u32 (&v)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(at), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
}
DEVICE void sync_warpgroup(int group) { asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory"); }

// W, S, Z as in skinny.cu; X from rows.cuh with float scales XS [M].
extern "C" __global__ void __launch_bounds__(THREADS, 1)
gemm(const u8* __restrict__ W, const void* __restrict__ S, const u16* __restrict__ Z, const u8* X, const float* XS, u16* Y,
     int M, int N, int chunks) {
  pdl_launch_dependents();
  extern __shared__ __align__(1024) u8 shared[];         // activations of all stages, their weights, results
  __shared__ __align__(8) u64 full[STAGES], empty[STAGES];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int tiles = (N + 15) >> 4, steps = chunks / CHUNKS;
  const int token_blocks = (M + TOKENS - 1) / TOKENS, blocks = (N + 127) / 128 * token_blocks;
  const u32 acts = (u32)__cvta_generic_to_shared(shared), weights = acts + STAGES * X_BYTES;
  const u32 full_at = (u32)__cvta_generic_to_shared(full), empty_at = (u32)__cvta_generic_to_shared(empty);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(full_at + 8 * i, 4);
      barrier_init(empty_at + 8 * i, TILES);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  int stage = 0, phase = 0;                              // of the next step to copy, or to multiply
  auto advance = [&]() {
    if (++stage == STAGES) { stage = 0; phase ^= 1; }
  };

  if (warp >= TILES) {                                   // four producers, one thread each: a copy takes tens of cycles
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    const int part = warp - TILES;
    if (lane) return;
    pdl_wait();
    for (int block = blockIdx.x; block < blocks; block += gridDim.x) {
      const int tile = block / token_blocks * TILES + part * 2;
      const u8* w0 = W + (u64)min(tile, tiles - 1) * steps * W_BYTES;
      const u8* w1 = W + (u64)min(tile + 1, tiles - 1) * steps * W_BYTES;
      const u8* x = X + (u64)(block % token_blocks) * steps * X_BYTES + part * (X_BYTES / 4);
      for (int i = 0; i < steps; i++) {
        const u32 full_now = full_at + 8 * stage, w_now = weights + (stage * TILES + part * 2) * W_BYTES;
        barrier_wait(empty_at + 8 * stage, phase ^ 1);
        barrier_expect(full_now, STAGE_BYTES / 4);
        bulk_copy(acts + stage * X_BYTES + part * (X_BYTES / 4), x, X_BYTES / 4, full_now);
        bulk_copy(w_now, w0, W_BYTES, full_now);
        bulk_copy(w_now + W_BYTES, w1, W_BYTES, full_now);
        x += X_BYTES;
        w0 += W_BYTES;
        w1 += W_BYTES;
        advance();
      }
    }
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  pdl_wait();
  [[maybe_unused]] const int g = lane >> 2, t = lane & 3;
  const int warpgroup = warp >> 2;
  const u32 results = weights + STAGES * TILES * W_BYTES + warpgroup * OUT_BYTES;
  auto operand = [&](int stage, int s) {                 // descriptor of fragment s of a stage, as in wide.cu
    return (u64)((acts + stage * X_BYTES + s * 32) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
  };
#if GROUP
  auto prefetch_scales = [&](int block) {                // of this warp's rows in a tile that comes later, into the L2 cache
    if (block >= blocks) return;
    const int size = chunks * 64 / GROUP * 32, tile = min(block / token_blocks * TILES + warp, tiles - 1);
    for (int i = lane * 128; i < size; i += 32 * 128)
      asm volatile("prefetch.global.L2 [%0];" ::"l"((const u8*)S + (u64)tile * size + i));
  };
  prefetch_scales(blockIdx.x);
#endif
  for (int block = blockIdx.x; block < blocks; block += gridDim.x) {
    const int tile = min(block / token_blocks * TILES + warp, tiles - 1);
    const int first_row = block / token_blocks * 128 + warpgroup * 64, first_token = block % token_blocks * TOKENS;
    Scales coming;                                       // of the next step to make fragments of
#if GROUP
    const u32 pairs = (u32)tile * (chunks * 64 / GROUP) * 8 + g;
    auto load_scales = [&](int step) {
      UNROLL for (int k = 0; k < SCALES; k++) {
        const u32 at = pairs + (min(step, steps - 1) * COLUMNS / GROUP + k) * 8;
        coming.scale[k] = __ldg((const u32*)S + at);
#if ASYM
        coming.zero[k] = __ldg(Z + at);
#endif
      }
    };
#if PROGRESSIVE
    float unit[2] = {0.f, 0.f};                          // of the row's bytes: its largest weight becomes 127 of them
    for (int k = t; k < chunks * 64 / GROUP; k += 4) {
      const u32 scale = __ldg((const u32*)S + pairs + k * 8);
#if ASYM
      const int zeros = __ldg(Z + pairs + k * 8), z0 = zeros & 255, z1 = zeros >> 8;
      const float most0 = (float)max(z0, 15 - z0), most1 = (float)max(z1, 15 - z1);
#else
      const float most0 = 8.f, most1 = 8.f;
#endif
      unit[0] = fmaxf(unit[0], fabsf(scale_of(scale, 0)) * most0);
      unit[1] = fmaxf(unit[1], fabsf(scale_of(scale, 1)) * most1);
    }
    UNROLL for (int k = 0; k < 2; k++) {
      unit[k] = fmaxf(unit[k], __shfl_xor_sync(0xffffffffu, unit[k], 1));
      unit[k] = fmaxf(unit[k], __shfl_xor_sync(0xffffffffu, unit[k], 2)) * (1.f / 127.f);
    }
    const float per_unit[2] = {unit[0] > 0.f ? 1.f / unit[0] : 0.f, unit[1] > 0.f ? 1.f / unit[1] : 0.f};
#endif
    load_scales(0);
    prefetch_scales(block + gridDim.x);
#elif ASYM
    coming.zero[0] = __ldg(Z + tile * 8 + g);
#endif
    u32 a[2][4][4];                                      // one step's multiply while the next one's are made
    Codes codes;                                         // of the next step
    Scales by;
    int fetched = 0;                                     // steps
    auto fetch = [&]() {                                 // codes of the next step
      barrier_wait(full_at + 8 * stage, phase);
      const u32 at = weights + (stage * TILES + warp) * W_BYTES + lane * 16;
      UNROLL for (int c = 0; c < CHUNKS; c++)
        UNROLL for (int k = 0; k < LOADS; k++) codes.q[c][k] = load_shared(at + (c * LOADS + k) * 512);
      by = coming;
#if PROGRESSIVE
      UNROLL for (int k = 0; k < SCALES; k++)
        UNROLL for (int row = 0; row < 2; row++)
          by.ratio[k][row] = half_twice(scale_of(by.scale[k], row) * per_unit[row]);
#endif
      fetched++;
#if GROUP
      load_scales(fetched);
#endif
    };
    auto make = [&](u32 (&to)[4][4], int s) {            // fragment s of the next step
      make_fragment(codes, by, s, to[s]);
      UNROLL for (int k = 0; k < 4; k++) asm volatile("" : "+r"(to[s][k]));  // now: the tensor cores are busy
    };
    auto release = [&](int stage) {                      // this warp has done with it
      if (lane == 0) barrier_arrive(empty_at + 8 * stage);
    };

    Sum sum[TOKENS / 8][4];
    UNROLL for (int j = 0; j < TOKENS / 8; j++)
      UNROLL for (int k = 0; k < 4; k++) sum[j][k] = 0;
    fetch();
    UNROLL for (int s = 0; s < 4; s++) make(a[0], s);
#if BY_GROUP
    Partial part[TOKENS / 8][4];
    auto multiply = [&](int p, bool more) {
      const int current = stage;
      advance();
      Scales now = by;                                   // of the sums to come
      UNROLL for (int k = 0; k < SCALES; k++) {
        wgmma_fence();
        UNROLL for (int s = k * 4 / SCALES; s < (k + 1) * 4 / SCALES; s++) {
          if (s == k * 4 / SCALES)
            wgmma<false>(part, a[p][s], operand(current, s));
          else
            wgmma<true>(part, a[p][s], operand(current, s));
        }
        wgmma_commit();
        if (k == SCALES - 1 && more) {
          fetch();
          UNROLL for (int s = 0; s < 4; s++) make(a[p ^ 1], s);
        }
        wgmma_wait<0>();
        if (k == SCALES - 1) release(current);
        const float s0 = scale_of(now.scale[k], 0), s1 = scale_of(now.scale[k], 1);
        UNROLL for (int j = 0; j < TOKENS / 8; j++)
          UNROLL for (int e = 0; e < 4; e++) sum[j][e] += (e >> 1 ? s1 : s0) * (float)part[j][e];
      }
    };
#else
    int before = -1;                                     // stage of the step before
    auto multiply = [&](int p, bool more) {
      const int current = stage;
      advance();
      wgmma_fence();
      UNROLL for (int s = 0; s < 4; s++) wgmma(sum, a[p][s], operand(current, s));
      wgmma_commit();
      wgmma_wait<1>();                                   // the step before
      if (before >= 0) release(before);
      before = current;
      if (more) {
        fetch();
        UNROLL for (int s = 0; s < 4; s++) make(a[p ^ 1], s);
      }
    };
#endif
    int i = 0;
    for (; i + 2 <= steps; i += 2) {
      multiply(0, true);
      multiply(1, i + 2 < steps);
    }
    if (i < steps) multiply(0, false);
#if !BY_GROUP
    wgmma_wait<0>();
    release(before);
#endif

    float gain[2] = {CODE_UNIT, CODE_UNIT};              // of rows g and g + 8
#if PROGRESSIVE
    UNROLL for (int k = 0; k < 2; k++) gain[k] = unit[k];
#elif !GROUP
    UNROLL for (int k = 0; k < 2; k++) gain[k] *= __ldg((const float*)S + min(tile * 16 + g + 8 * k, N - 1));
#endif
    UNROLL for (int c = 0; c < TOKENS / 64; c++) {       // 64 tokens at a time
      UNROLL for (int j = c * 8; j < c * 8 + 8; j += 2) {
        u32 v[4];
        UNROLL for (int k = 0; k < 2; k++) {
          const int token = first_token + (j + k) * 8 + t * 2;
          const float x0 = XS[min(token, M - 1)], x1 = XS[min(token + 1, M - 1)];
          const Sum (&d)[4] = sum[j + k];
          v[2 * k] = floats_to_acts((float)d[0] * gain[0] * x0, (float)d[1] * gain[0] * x1);
          v[2 * k + 1] = floats_to_acts((float)d[2] * gain[1] * x0, (float)d[3] * gain[1] * x1);
        }
        const int token = (j - c * 8 + (lane >> 4)) * 8 + (lane & 7), unit = (warp & 3) * 2 + (lane >> 3 & 1);
        store_transposed(results + token * 128 + ((unit ^ (token & 7)) << 4), v);
      }
      sync_warpgroup(warpgroup);
      UNROLL for (int k = 0; k < 4; k++) {
        const int at = k * 128 + (threadIdx.x & 127), token = at >> 3, unit = at & 7, n = first_row + unit * 8;
        const uint4 v = load_shared(results + token * 128 + ((unit ^ (token & 7)) << 4));
        if (first_token + c * 64 + token >= M) continue;
        u16* to = Y + (u64)(first_token + c * 64 + token) * N + n;
        if (n + 8 <= N && !(N & 7)) {
          *(uint4*)to = v;
        } else {
          UNROLL for (int e = 0; e < 8; e++)
            if (n + e < N) to[e] = (u16)(word(v, e >> 1) >> (16 * (e & 1)));
        }
      }
      sync_warpgroup(warpgroup);
    }
  }
}
