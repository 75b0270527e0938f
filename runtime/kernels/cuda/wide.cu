// y [M, N] = x [M, K] @ weight.T with int8 activations for tens to hundreds of tokens, on Hopper's warpgroup tensor cores.
//
// As in skinny.cu the weights are the A operand and come from registers: each warp of a warpgroup turns its 16 rows of
// 128 columns into fragments while the 128 before them multiply, and wgmma takes TOKENS tokens from shared memory, which
// all warpgroups of the block share. Bulk copies bring those into a ring of STAGES steps of 128 columns and signal
// barriers; rows.cuh has put them into the order of the weights' columns. A cluster of SK blocks splits K. Sums are exact
// within a scale group, then float32.
//
// Macros: WEIGHT_BITS; ACT_BITS 8; BF16; SCALE_BF16; GROUP as in skinny.cu; TOKENS 16 | 32 | 64 | 128 of a block; WG:
//   warpgroups of a block; NT: 64-row tiles of a warpgroup; SK; PF: steps whose weights are in flight, even; STAGES; MINB.
//   After hopper.cuh. The weight is symmetric and has an even number of chunks.

#define LOADS (WEIGHT_BITS / 4)                          // 16-byte loads of a lane for 16 rows of a chunk
#define SCALES (GROUP ? 128 / (GROUP ? GROUP : 1) : 1)   // scale groups of a step
#define FRAGMENTS 4                                      // of a step: 32 bytes of a token each
#define THREADS (WG * 128)
#define ROWS (WG * NT * 64)                              // of a block
#define STAGE_BYTES (TOKENS * 128)
#define LD (ROWS + 4)                                    // floats from token to token: no bank conflicts
#define UNROLL _Pragma("unroll")
#if GROUP                                                // sums of a scale group apart from those of all
typedef float Sum;
#else
typedef Partial Sum;
#endif

struct Slot {                                            // one step's weights of one warp, on their way
  uint4 codes[NT][2][LOADS];
#if GROUP
  u32 scales[NT][SCALES];
#endif
};

// W, S as in skinny.cu (Z is not read); X from rows.cuh with float scales XS [M]. Grid: SK (one cluster), token blocks, row
// blocks.
extern "C" __global__ void __launch_bounds__(THREADS, MINB)
wide(const uint4* __restrict__ W, const void* __restrict__ S, const u16* __restrict__ Z, const u8* X, const float* XS,
     u16* Y, int M, int N, int chunks) {
  pdl_launch_dependents();
  extern __shared__ __align__(1024) u8 shared[];         // STAGES steps of x; afterwards partial sums [TOKENS][LD]
  __shared__ __align__(8) u64 full[STAGES], empty[STAGES];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int rank = blockIdx.x, first_token = blockIdx.y * TOKENS, tiles = (N + 15) >> 4;
  const int steps = chunks / 2;
  const int begin = (int)((long long)steps * rank / SK), count = (int)((long long)steps * (rank + 1) / SK) - begin;
  const u32 stages = (u32)__cvta_generic_to_shared(shared);
  const u32 full_at = (u32)__cvta_generic_to_shared(full), empty_at = (u32)__cvta_generic_to_shared(empty);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(full_at + 8 * i, 1);
      barrier_init(empty_at + 8 * i, WG * 4);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  auto fetch = [&](int i) {                              // the i-th step of this block
    barrier_expect(full_at + 8 * (i % STAGES), STAGE_BYTES);
    bulk_copy(stages + i % STAGES * STAGE_BYTES, X + ((u64)blockIdx.y * steps + begin + i) * STAGE_BYTES, STAGE_BYTES,
              full_at + 8 * (i % STAGES));
  };

  const uint4* codes[NT];                                // of the next step to load
#if GROUP
  u32 pair_at[NT];                                       // of its first scale pair
#endif
  UNROLL for (int n = 0; n < NT; n++) {
    const int tile = min((((int)blockIdx.z * WG + (warp >> 2)) * NT + n) * 4 + (warp & 3), tiles - 1);
    codes[n] = W + ((u64)tile * steps + begin) * (LOADS * 64) + lane;
#if GROUP
    pair_at[n] = ((u32)tile * steps + begin) * (SCALES * 8) + g;
#endif
  }
  Slot slots[PF];
  auto load_next = [&](Slot& slot) {
    UNROLL for (int n = 0; n < NT; n++) {
      UNROLL for (int k = 0; k < 2 * LOADS; k++) slot.codes[n][k / LOADS][k % LOADS] = load_weights(codes[n] + k * 32);
      codes[n] += LOADS * 64;
#if GROUP
      UNROLL for (int k = 0; k < SCALES; k++) {
        slot.scales[n][k] = __ldg((const u32*)S + pair_at[n] + k * 8);
      }
      pair_at[n] += SCALES * 8;
#endif
    }
  };
  UNROLL for (int p = 0; p < PF; p++)
    if (p < count) load_next(slots[p]);
  pdl_wait();
  if (threadIdx.x == 0)
    for (int i = 0; i < min(STAGES, count); i++) fetch(i);

  Sum sum[NT][TOKENS / 8][4];
  UNROLL for (int n = 0; n < NT; n++)
    UNROLL for (int j = 0; j < TOKENS / 8; j++)
      UNROLL for (int k = 0; k < 4; k++) sum[n][j][k] = 0;

#if WEIGHT_BITS == 8
  const u32 flip = (u32)M >> 31;                         // zero, but only we know: a copy of its own for the tensor cores
#endif
  // The fragments of a step: 32 bytes of a token each.
  auto convert = [&](u32 (&a)[NT][FRAGMENTS][4], const Slot& slot) {
    UNROLL for (int n = 0; n < NT; n++)
      UNROLL for (int s = 0; s < FRAGMENTS; s++) {
        u32 (&f)[4] = a[n][s];
#if WEIGHT_BITS == 4                                     // signed nibbles as bytes of 16 times their value
        const u32 q0 = word(slot.codes[n][s >> 1][0], 2 * (s & 1)), q1 = word(slot.codes[n][s >> 1][0], 2 * (s & 1) + 1);
        f[0] = (q0 << 4) & 0xf0f0f0f0u;
        f[1] = q0 & 0xf0f0f0f0u;
        f[2] = (q1 << 4) & 0xf0f0f0f0u;
        f[3] = q1 & 0xf0f0f0f0u;
#else
        UNROLL for (int k = 0; k < 4; k++) f[k] = word(slot.codes[n][s >> 1][s & 1], k) ^ flip;
#endif
      }
    UNROLL for (int n = 0; n < NT; n++)                  // now, not later: the tensor cores are busy in the meantime
      UNROLL for (int s = 0; s < FRAGMENTS; s++)
        UNROLL for (int k = 0; k < 4; k++) asm volatile("" : "+r"(a[n][s][k]));
  };
  // Descriptor of fragment s of a stage: start address, leading offset (unused), 1024 bytes from 8 tokens to the next 8,
  // 128-byte swizzle.
  auto operand = [&](int i, int s) {
    const u32 at = stages + i % STAGES * STAGE_BYTES + s * 32;
    return (u64)(at >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
  };
  auto release = [&](int i) {                            // this warp has done with step i
    if (lane == 0) barrier_arrive(empty_at + 8 * (i % STAGES));
  };
  auto refill = [&](int i) {                             // all warps have, or will before long
    if (threadIdx.x == 0 && i >= 0 && i + STAGES < count) {
      barrier_wait(empty_at + 8 * (i % STAGES), (i / STAGES) & 1);
      fetch(i + STAGES);
    }
    __syncwarp();
  };

  u32 a[2][NT][FRAGMENTS][4];                            // one step's multiply while the next one's are made
#if GROUP
  float scale[NT][SCALES][2];                            // of the sums to come
#endif
  auto keep_scales = [&](const Slot& slot) {
#if GROUP
    UNROLL for (int n = 0; n < NT; n++)
      UNROLL for (int k = 0; k < SCALES; k++)
        UNROLL for (int row = 0; row < 2; row++) scale[n][k][row] = scale_of(slot.scales[n][k], row);
#endif
  };
  auto multiply = [&](int p, int i) {                    // step i, in slot p; PF is even
    barrier_wait(full_at + 8 * (i % STAGES), (i / STAGES) & 1);
#if GROUP
    UNROLL for (int k = 0; k < SCALES; k++) {
      Partial part[NT][TOKENS / 8][4];
      UNROLL for (int n = 0; n < NT; n++)
        UNROLL for (int j = 0; j < TOKENS / 8; j++)
          UNROLL for (int e = 0; e < 4; e++) part[n][j][e] = 0;
      wgmma_fence();
      UNROLL for (int s = k * 4 / SCALES; s < (k + 1) * 4 / SCALES; s++)
        UNROLL for (int n = 0; n < NT; n++) wgmma(part[n], a[p & 1][n][s], operand(i, s));
      wgmma_commit();
      if (k == SCALES - 1) convert(a[~p & 1], slots[(p + 1) % PF]);
      wgmma_wait<0>();
      UNROLL for (int n = 0; n < NT; n++)
        UNROLL for (int j = 0; j < TOKENS / 8; j++)
          UNROLL for (int e = 0; e < 4; e++) sum[n][j][e] += scale[n][k][e >> 1] * small_int_to_float(part[n][j][e]);
    }
#else
    wgmma_fence();
    UNROLL for (int s = 0; s < FRAGMENTS; s++)
      UNROLL for (int n = 0; n < NT; n++) wgmma(sum[n], a[p & 1][n][s], operand(i, s));
    wgmma_commit();
    convert(a[~p & 1], slots[(p + 1) % PF]);             // past the last step: of no use, and no harm
    wgmma_wait<0>();
#endif
    keep_scales(slots[(p + 1) % PF]);
    if (i + 1 + PF < count) load_next(slots[(p + 1) % PF]);
    release(i);
    refill(i - 1);
  };
  convert(a[0], slots[0]);
  keep_scales(slots[0]);
  if (PF < count) load_next(slots[0]);
  // No branch leaves the pipelined loop, or the compiler would not let products overlap.
  int base = 0;
  for (; base + PF <= count; base += PF)
    UNROLL for (int p = 0; p < PF; p++) multiply(p, base + p);
  UNROLL for (int p = 0; p < PF; p++)                    // fewer than PF steps remain
    if (base + p < count) multiply(p, base + p);
  __syncthreads();                                       // every stage has been read: their memory takes the sums

  float* partial = (float*)shared;
  UNROLL for (int n = 0; n < NT; n++)
    UNROLL for (int j = 0; j < TOKENS / 8; j++)
      UNROLL for (int k = 0; k < 4; k++) {
        const int token = j * 8 + t * 2 + (k & 1), row = (((warp >> 2) * NT + n) * 4 + (warp & 3)) * 16 + g + (k >> 1) * 8;
        partial[token * LD + row] = (float)sum[n][j][k];
      }
  if (SK > 1) cluster_sync(); else __syncthreads();
  const int tokens = min(TOKENS, M - first_token);
  for (int i = rank * THREADS + threadIdx.x; i < tokens * ROWS; i += SK * THREADS) {
    const int token = i / ROWS, row = i % ROWS, n = blockIdx.z * ROWS + row;
    float v = 0.f;
    const u32 at = (u32)__cvta_generic_to_shared(partial + token * LD + row);
    UNROLL for (int j = 0; j < SK; j++) v += SK > 1 ? cluster_load(at, j) : partial[token * LD + row];
    if (n < N) {
      v *= XS[first_token + token] * (WEIGHT_BITS == 4 ? 0.0625f : 1.f);
#if !GROUP
      v *= __ldg((const float*)S + n);
#endif
      Y[(u64)(first_token + token) * N + n] = float_to_act(v);
    }
  }
  if (SK > 1) cluster_sync();                            // nobody leaves while its sums are being read
}
