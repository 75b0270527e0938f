// y [M, N] = x [M, K] @ weight.T for few tokens (M <= 8 MT), bound by reading the weights once.
//
// The weights are the A operand (16 rows) of mma.sync, so M = 1..8 cost the same. They lie in fragment order
// (layout.py): one 16-byte load a lane goes straight into registers. A block owns 16 NT rows and splits K over its KW
// warps, a cluster splits it again over SK blocks; partial sums meet in (distributed) shared memory, without atomics,
// so results do not depend on timing. Weights are requested before the previous kernel is waited for.
//
// After gated.cuh. Macros: WEIGHT_BITS 4 | 8; ACT_BITS 16 | 8; BF16; SCALE_BF16 (group scales); GROUP 0 (per channel) | 32 | 64 | 128;
//   ASYM; CH: chunks of 64 columns a step (GROUP 128 needs 2); MT, NT, KW, SK as above; PF: steps in flight;
//   XPF: 1 where activations are loaded with the weights, PF steps ahead; MINB: blocks an SM must hold; GATED: the weight is
//   gate and up [N / 2 each, a multiple of 16], NT is even, and y [M, N / 2] = silu(gate) * up.

#define LOADS (WEIGHT_BITS / 4)                          // 16-byte loads of a lane for 16 rows x 64 columns
#define SCALES (GROUP ? 64 * CH / (GROUP ? GROUP : 1) : 0)   // scale groups of a step
#define HALVES (GROUP ? GROUP / 32 : 2 * CH)             // runs of 32 columns that share a scale
#define XBYTES (ACT_BITS / 8)
#define XLOADS (ACT_BITS / 8)                            // 16-byte loads of a lane for 8 tokens x 64 columns
#define XSLOTS (XPF ? PF : 1)
#define STRIDE (KW * SK)

#if ACT_BITS == 8
typedef int Partial;                                     // exact within a scale group
#else
typedef float Partial;
#endif
#if GROUP
typedef float Sum;
#else
typedef Partial Sum;
#endif

#define UNROLL _Pragma("unroll")

DEVICE float part_to_float(float part) { return part; }
DEVICE float part_to_float(int part) { return small_int_to_float(part); }   // at most 255 * 127 * 128

#if ACT_BITS == 8
// A lane has 16 columns of a chunk, in two pairs of words, one for each product. A half of a chunk is one of them; where groups
// are of 32, both of half of the lanes, and the others' activations count as zeros.
#define FIRST_PAIR(h) (GROUP == 32 ? 0 : (h))
#define LAST_PAIR(h) (GROUP == 32 ? 1 : (h))
DEVICE u32 act_word(const uint4& x, int k, int h, int t) { return GROUP == 32 && t >> 1 != h ? 0 : word(x, k); }
#endif

struct Slot {                                            // one step's weights of one warp, on their way
  uint4 codes[NT][CH * LOADS];
#if GROUP
  u32 scales[NT][SCALES];
#if ASYM
  u32 zeros[NT][SCALES];
#endif
#endif
};

// W: codes in fragment order. S: group scales [tile, group, 8, 2] 16-bit, or float [N] per channel. Z: zero points
// [tile, group, 8, 2] u8 (ASYM). X: [M, K] activations, or int8 with float scales XS [M].
// steps: K / (64 CH).
extern "C" __global__ void __launch_bounds__(KW * 32, MINB)
skinny(const uint4* __restrict__ W, const void* __restrict__ S, const u16* __restrict__ Z, const u8* X, const float* XS,
       u16* Y, int M, int N, int steps) {
  pdl_launch_dependents();
  extern __shared__ __align__(16) float partial[];       // [KW (+ 1)][M][16 NT]
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int rank = SK > 1 ? blockIdx.y : 0;
  const int tiles = (N + 15) >> 4;
  const int first = rank * KW + warp;

  // Tiles past the last one repeat it; their results are not stored.
  const uint4* codes[NT];
#if GROUP || ASYM
  u32 groups_before[NT];                                 // scale groups before this tile's first
#endif
  UNROLL for (int n = 0; n < NT; n++) {
#if GATED                                                // half of a block's tiles are of gate, half the same of up
    const int tile = min((int)blockIdx.x * (NT / 2) + n % (NT / 2), tiles / 2 - 1) + (n < NT / 2 ? 0 : tiles / 2);
#else
    const int tile = min((int)blockIdx.x * NT + n, tiles - 1);
#endif
    codes[n] = W + (u64)tile * steps * (CH * LOADS * 32) + unit_place(lane);
#if GROUP || ASYM
    groups_before[n] = GROUP ? (u32)tile * steps * SCALES : tile;
#endif
  }

  Slot slots[PF];
  uint4 x[XSLOTS][CH][MT][XLOADS];
  const u8* xrow[MT];
  UNROLL for (int m = 0; m < MT; m++)
    xrow[m] = X + (u64)min(m * 8 + g, M - 1) * steps * (64 * CH * XBYTES) + t * 16;

  auto load_step = [&](Slot& slot, int step) {
    UNROLL for (int n = 0; n < NT; n++) {
      UNROLL for (int i = 0; i < CH * LOADS; i++)
        slot.codes[n][i] = load_weights(codes[n] + (u32)step * (CH * LOADS * 32) + i * 32);
#if GROUP
      UNROLL for (int i = 0; i < SCALES; i++) {
        const u32 at = (groups_before[n] + (u32)step * SCALES + i) * 8 + g;
        slot.scales[n][i] = __ldg((const u32*)S + at);
#if ASYM
        slot.zeros[n][i] = __ldg(Z + at);
#endif
      }
#endif
    }
  };
  auto load_x = [&](uint4 (&to)[CH][MT][XLOADS], int step) {
    UNROLL for (int c = 0; c < CH; c++)
      UNROLL for (int m = 0; m < MT; m++)
        UNROLL for (int i = 0; i < XLOADS; i++)
          to[c][m][i] = load_activations(xrow[m] + (step * CH + c) * (64 * XBYTES) + i * 64);
  };

  UNROLL for (int p = 0; p < PF; p++)
    if (first + p * STRIDE < steps) load_step(slots[p], first + p * STRIDE);
#if ASYM && !GROUP
  u32 channel_zeros[NT];
  UNROLL for (int n = 0; n < NT; n++) channel_zeros[n] = __ldg(Z + groups_before[n] * 8 + g);
#endif
  pdl_wait();
#if XPF
  UNROLL for (int p = 0; p < PF; p++)
    if (first + p * STRIDE < steps) load_x(x[p], first + p * STRIDE);
#endif

  Sum sum[NT][MT][4];
  UNROLL for (int n = 0; n < NT; n++)
    UNROLL for (int m = 0; m < MT; m++)
      UNROLL for (int k = 0; k < 4; k++) sum[n][m][k] = 0;
#if ASYM && ACT_BITS == 8
  int xsum[MT][4];                                       // 16 (4-bit) or 1 (8-bit) x sum of this group's activations
  UNROLL for (int m = 0; m < MT; m++)
    UNROLL for (int k = 0; k < 4; k++) xsum[m][k] = 0;
#endif

  for (int base = first; base < steps; base += PF * STRIDE) {
    UNROLL for (int p = 0; p < PF; p++) {
      const int step = base + p * STRIDE;
      if (step >= steps) break;
      const int xs = XPF ? p : 0;
#if !XPF
      load_x(x[0], step);
#endif
      Slot& slot = slots[p];
      UNROLL for (int group = 0; group < 2 * CH / HALVES; group++) {   // of 32 HALVES columns with one scale
#if ASYM && ACT_BITS == 8
#if GROUP
        UNROLL for (int m = 0; m < MT; m++)
          UNROLL for (int k = 0; k < 4; k++) xsum[m][k] = 0;
#endif
        const u32 one = WEIGHT_BITS == 4 ? 0x10101010u : 0x01010101u;
        const u32 ones[4] = {one, one, one, one};
        UNROLL for (int half = group * HALVES; half < (group + 1) * HALVES; half++)
          UNROLL for (int j = FIRST_PAIR(half & 1); j <= LAST_PAIR(half & 1); j++)
            UNROLL for (int m = 0; m < MT; m++)
              mma(xsum[m], ones, act_word(x[xs][half >> 1][m][0], 2 * j, half & 1, t),
                  act_word(x[xs][half >> 1][m][0], 2 * j + 1, half & 1, t));
#endif
        UNROLL for (int n = 0; n < NT; n++) {
#if GROUP
          Partial part[MT][4];
          UNROLL for (int m = 0; m < MT; m++)
            UNROLL for (int k = 0; k < 4; k++) part[m][k] = 0;
#else
          Sum (&part)[MT][4] = sum[n];
#endif
#if ACT_BITS == 16
#if !ASYM
          const ZeroPoint z0 = zero_point(1u << (WEIGHT_BITS - 1)), z1 = z0;
#elif GROUP
          const ZeroPoint z0 = zero_point(slot.zeros[n][group] & 255), z1 = zero_point(slot.zeros[n][group] >> 8);
#else
          const ZeroPoint z0 = zero_point(channel_zeros[n] & 255), z1 = zero_point(channel_zeros[n] >> 8);
#endif
#endif
          UNROLL for (int half = group * HALVES; half < (group + 1) * HALVES; half++) {   // 32 columns
            const int c = half >> 1, h = half & 1;
#if ACT_BITS == 16
            UNROLL for (int j = 0; j < 2; j++) {         // 16 columns
              u32 a[4];
#if WEIGHT_BITS == 8
              bytes_to_acts(word(slot.codes[n][2 * c + h], 2 * j), z0, z1, a[0], a[1]);
              bytes_to_acts(word(slot.codes[n][2 * c + h], 2 * j + 1), z0, z1, a[2], a[3]);
#else
              const u32 q0 = word(slot.codes[n][c], 2 * j), q1 = word(slot.codes[n][c], 2 * j + 1);
              pairs_to_acts(q0 >> 8 * h, q1 >> 8 * h, z0, z1, a);
#endif
              UNROLL for (int m = 0; m < MT; m++) mma(part[m], a, word(x[xs][c][m][h], 2 * j), word(x[xs][c][m][h], 2 * j + 1));
            }
#else
            UNROLL for (int j = FIRST_PAIR(h); j <= LAST_PAIR(h); j++) {
#if WEIGHT_BITS == 4                                     // signed nibbles as bytes of 16 times their value
              const u32 q0 = word(slot.codes[n][c], 2 * j), q1 = word(slot.codes[n][c], 2 * j + 1);
              const u32 a[4] = {(q0 << 4) & 0xf0f0f0f0u, q0 & 0xf0f0f0f0u, (q1 << 4) & 0xf0f0f0f0u, q1 & 0xf0f0f0f0u};
#else
              const uint4 q0 = slot.codes[n][2 * c], q1 = slot.codes[n][2 * c + 1];   // of rows g and g + 8
              const u32 a[4] = {word(q0, 2 * j), word(q1, 2 * j), word(q0, 2 * j + 1), word(q1, 2 * j + 1)};
#endif
              UNROLL for (int m = 0; m < MT; m++)
                mma(part[m], a, act_word(x[xs][c][m][0], 2 * j, h, t), act_word(x[xs][c][m][0], 2 * j + 1, h, t));
            }
#endif
          }
#if GROUP
          const float s0 = scale_of(slot.scales[n][group], 0), s1 = scale_of(slot.scales[n][group], 1);
#if ASYM && ACT_BITS == 8
          const int mid = 1 << (WEIGHT_BITS - 1);
          const int zero0 = (int)(slot.zeros[n][group] & 255) - mid, zero1 = (int)(slot.zeros[n][group] >> 8) - mid;
          UNROLL for (int m = 0; m < MT; m++)
            UNROLL for (int k = 0; k < 4; k++) part[m][k] -= (k < 2 ? zero0 : zero1) * xsum[m][k];
#endif
          UNROLL for (int m = 0; m < MT; m++)
            UNROLL for (int k = 0; k < 4; k++) sum[n][m][k] += (k < 2 ? s0 : s1) * part_to_float(part[m][k]);
#endif
        }
      }
      if (step + PF * STRIDE < steps) {
        load_step(slot, step + PF * STRIDE);
#if XPF
        load_x(x[p], step + PF * STRIDE);
#endif
      }
    }
  }
#if ASYM && ACT_BITS == 8 && !GROUP
  UNROLL for (int n = 0; n < NT; n++) {
    const int mid = 1 << (WEIGHT_BITS - 1);
    const int zero0 = (int)(channel_zeros[n] & 255) - mid, zero1 = (int)(channel_zeros[n] >> 8) - mid;
    UNROLL for (int m = 0; m < MT; m++)
      UNROLL for (int k = 0; k < 4; k++) sum[n][m][k] -= (k < 2 ? zero0 : zero1) * xsum[m][k];
  }
#endif

  const int ROWS = NT * 16, outputs = M * ROWS;
  UNROLL for (int n = 0; n < NT; n++)
    UNROLL for (int m = 0; m < MT; m++)
      UNROLL for (int k = 0; k < 4; k++) {
        const int token = m * 8 + t * 2 + (k & 1), row = n * 16 + g + (k >> 1) * 8;
        if (token < M) partial[warp * outputs + token * ROWS + row] = (float)sum[n][m][k];
      }
  __syncthreads();

  // A sum over K to the product of a token and row n of the weight.
  auto finish = [&](float v, int token, int n) {
#if ACT_BITS == 8
    v *= XS[token] * (WEIGHT_BITS == 4 ? 0.0625f : 1.f);
#endif
#if !GROUP
    v *= __ldg((const float*)S + n);
#endif
    return v;
  };
#if SK == 1
  auto total = [&](int i) {
    float v = 0.f;
    UNROLL for (int j = 0; j < KW; j++) v += partial[j * outputs + i];
    return v;
  };
  const int worker = threadIdx.x, workers = KW * 32;
#else
  float* mine = partial + KW * outputs;
  for (int i = threadIdx.x; i < outputs; i += KW * 32) {
    float v = 0.f;
    UNROLL for (int j = 0; j < KW; j++) v += partial[j * outputs + i];
    mine[i] = v;
  }
  cluster_sync();
  auto total = [&](int i) {
    float v = 0.f;
    UNROLL for (int j = 0; j < SK; j++) v += cluster_load((u32)__cvta_generic_to_shared(mine + i), j);
    return v;
  };
  const int worker = rank * (KW * 32) + threadIdx.x, workers = SK * KW * 32;
#endif
#if GATED
#pragma unroll 1                                         // or the compiler spends the registers of two more blocks here
  for (int i = worker; i < outputs / 2; i += workers) {
    const int token = i / (ROWS / 2), row = i % (ROWS / 2), n = blockIdx.x * (ROWS / 2) + row;
    if (n >= N / 2) continue;
    const int at = token * ROWS + row;
    const u16 gate = float_to_act(finish(total(at), token, n));
    const u16 up = float_to_act(finish(total(at + ROWS / 2), token, N / 2 + n));
    Y[(u64)token * (N / 2) + n] = float_to_act(gated(act_to_float(gate), act_to_float(up)));   // as silu.cu would
  }
#else
  for (int i = worker; i < outputs; i += workers) {
    const int token = i / ROWS, n = blockIdx.x * ROWS + i % ROWS;
    if (n < N) Y[(u64)token * N + n] = float_to_act(finish(total(i), token, n));
  }
#endif
#if SK > 1
  cluster_sync();                                        // nobody leaves while its sums are being read
#endif
}
