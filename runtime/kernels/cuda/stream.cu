// y [M, N] = x [M, K] @ weight.T for up to 16 tokens of 16-bit activations, on Hopper: bound by reading the weights once.
//
// As in skinny.cu the weights are the A operand of mma.sync, a block owns 16 NT rows and splits K over its KW warps, and
// partial sums meet in shared memory. But each warp has a ring of PF steps of 128 columns of its own there, which the
// tensor copy engine fills. So what is in flight costs no registers: a block has more tiles to share the activations among,
// and those too are brought ahead of their use. A warp waits for its own copies only. Weights are requested before the
// previous kernel is waited for.
//
// Codes of int4 in groups of 128, where a block has many tiles, are not brought to their value: they are set into the
// mantissa of a power of two, and that power and the zero point, times the sum of the group's activations, is taken from
// the float32 sum. The tensor cores add activations up, once for all tiles.
//
// After copies.cuh and gated.cuh. Macros: WEIGHT_BITS 4 | 8; ACT_BITS 16; BF16; SCALE_BF16; GROUP; ASYM; GATED as in
//   skinny.cu; MT 1 | 2: 8 tokens each; NT, KW, PF as above; MINB: blocks an SM must hold.

#define UNROLL _Pragma("unroll")
#define LOADS (WEIGHT_BITS / 4)                          // 16-byte units of a lane for 16 rows of 64 columns
#define SCALES (GROUP ? 128 / (GROUP ? GROUP : 1) : 1)   // scale groups of a step
#define HALVES (4 / SCALES)                              // runs of 32 columns that share a scale
#define PARTS (GATED ? 2 : 1)                            // of a block's tiles: those of gate, the same of up
#define ROWS (16 * NT)
#define LD (ROWS + 8)                                    // floats from token to token: no bank conflicts
#define SUMS_AS_CODED (WEIGHT_BITS == 4 && GROUP == 128 && NT >= MT + 3)

#define ROOM(BYTES) (PARTS * ((BYTES / PARTS + 127) / 128 * 128))   // a copy of each part begins at a multiple of 128
#define X_BYTES (2 * MT * 1024)                          // of a step: 64 columns of 8 MT tokens twice, in 128-byte swizzle
#define CODE_BYTES (LOADS * NT * 1024)
#define SCALE_BYTES (GROUP ? NT * SCALES * 32 : 0)
#define ZERO_BYTES (GROUP && ASYM ? NT * SCALES * 16 : 0)
#define CODES_AT (KW * PF * X_BYTES)
#define SCALES_AT (CODES_AT + KW * PF * CODE_BYTES)
#define ZEROS_AT (SCALES_AT + KW * PF * ROOM(SCALE_BYTES))
#define BARRIERS_AT (ZEROS_AT + KW * PF * ROOM(ZERO_BYTES))

#if SUMS_AS_CODED
// The power that codes are set in. The smaller, the less is lost where activations do not cancel out: tensor cores cut off
// what a sum has no room for, always towards zero. 1024, which spares float16 a shift, would cost 0.2 % then.
#define POWER (BF16 ? 128.f : 64.f)
// As pairs_to_acts, each code plus the power.
DEVICE void pairs_to_coded(u32 q0, u32 q1, u32 (&a)[4]) {
#if BF16
  a[0] = mask_or(q0, 0x000f000fu, 0x43004300u);
  a[1] = mask_or(q0 >> 4, 0x000f000fu, 0x43004300u);
  a[2] = mask_or(q1, 0x000f000fu, 0x43004300u);
  a[3] = mask_or(q1 >> 4, 0x000f000fu, 0x43004300u);
#else
  a[0] = mask_or(q0 << 4, 0x00f000f0u, 0x54005400u);
  a[1] = mask_or(q0, 0x00f000f0u, 0x54005400u);
  a[2] = mask_or(q1 << 4, 0x00f000f0u, 0x54005400u);
  a[3] = mask_or(q1, 0x00f000f0u, 0x54005400u);
#endif
}
#endif

// What the tensor copy engine reads: x [M, 64 chunks] in boxes of M by 64; the weight's codes, scales and zero points as in
// skinny.cu, a row for every tile of 16, in boxes of NT / PARTS tiles and 256 words (codes) or a step. Past the last column
// and tile all are zeros.
struct Maps { TensorMap x, codes, scales, zeros; };

// S: float [N] per channel (GROUP 0); Z: zero points per channel; steps of 128 columns.
extern "C" __global__ void __launch_bounds__(KW * 32, MINB)
stream(const void* __restrict__ S, const u16* __restrict__ Z, u16* Y, int M, int N, int steps,
       const __grid_constant__ Maps maps) {
  pdl_launch_dependents();
  extern __shared__ __align__(1024) u8 shared[];         // the rings, their barriers; later partial sums [KW][M][LD]
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int tiles = (N + 15) >> 4;
  const u32 shared_at = (u32)__cvta_generic_to_shared(shared), full_at = shared_at + BARRIERS_AT + warp * PF * 8;
  auto tile_of = [&](int n) {                            // a block's n-th; half of them are of gate, half the same of up
    return (int)blockIdx.x * (NT / PARTS) + n % (NT / PARTS) + n / (NT / PARTS) * (tiles / 2);
  };
  [[maybe_unused]] auto place = [&](int slot, int n, int bytes) {   // of tile n's scales or zero points, `bytes` in all
    return slot * ROOM(bytes) + n / (NT / PARTS) * (ROOM(bytes) / PARTS) + n % (NT / PARTS) * (bytes / NT);
  };

  auto copy_weights = [&](int p, int step) {
    const int slot = warp * PF + p;
    const u32 barrier = full_at + 8 * p;
    barrier_expect(barrier, M * 256 + CODE_BYTES + SCALE_BYTES + ZERO_BYTES);
    UNROLL for (int part = 0; part < PARTS; part++) {
      const int n = part * (NT / PARTS), tile = tile_of(n);
      UNROLL for (int i = 0; i < LOADS; i++)
        tensor_copy(shared_at + CODES_AT + slot * CODE_BYTES + (i * NT + n) * 1024, maps.codes, (step * LOADS + i) * 256,
                    tile, barrier);
#if GROUP
      tensor_copy(shared_at + SCALES_AT + place(slot, n, SCALE_BYTES), maps.scales, step * SCALES * 8, tile, barrier);
#if ASYM
      tensor_copy(shared_at + ZEROS_AT + place(slot, n, ZERO_BYTES), maps.zeros, step * SCALES * 8, tile, barrier);
#endif
#endif
    }
  };
  auto copy_x = [&](int p, int step) {
    UNROLL for (int c = 0; c < 2; c++)
      tensor_copy(shared_at + (warp * PF + p) * X_BYTES + c * (MT * 1024), maps.x, step * 128 + c * 64, 0, full_at + 8 * p);
  };
  if (lane == 0) {
    UNROLL for (int p = 0; p < PF; p++) barrier_init(full_at + 8 * p, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    UNROLL for (int p = 0; p < PF; p++)
      if (warp + p * KW < steps) copy_weights(p, warp + p * KW);
    tensor_prefetch(maps.x);
  }
#if ASYM && !GROUP
  u32 channel_zeros[NT];
  UNROLL for (int n = 0; n < NT; n++) channel_zeros[n] = __ldg(Z + min(tile_of(n), tiles - 1) * 8 + g);
#endif
  pdl_wait();
  if (lane == 0)
    UNROLL for (int p = 0; p < PF; p++)
      if (warp + p * KW < steps) copy_x(p, warp + p * KW);
  __syncwarp();

  float sum[NT][MT][4];
  UNROLL for (int n = 0; n < NT; n++)
    UNROLL for (int m = 0; m < MT; m++)
      UNROLL for (int k = 0; k < 4; k++) sum[n][m][k] = 0.f;
  // Columns 0, 1, 2, ... of the tensor cores' result are tokens 0, 4, 1, 5, ...: then lanes that read together meet no bank
  // conflicts.
  const int token_of_g = (g >> 1) + 4 * (g & 1);
  const int x_at = token_of_g * 128 + ((t ^ token_of_g) << 4);

  for (int base = warp, phase = 0; base < steps; base += PF * KW, phase ^= 1) {
    UNROLL for (int p = 0; p < PF; p++) {
      const int step = base + p * KW, slot = warp * PF + p;
      if (step >= steps) break;
      barrier_wait(full_at + 8 * p, phase);
      const u8* acts = shared + slot * X_BYTES;
      uint4 x[4][MT];                                    // of each 32 columns
      UNROLL for (int half = 0; half < 4; half++)
        UNROLL for (int m = 0; m < MT; m++)
          x[half][m] = *(const uint4*)(acts + ((half >> 1) * MT + m) * 1024 + (x_at ^ (half & 1) * 64));
#if SUMS_AS_CODED
      float xsum[MT][4];                                 // of the group's activations
      const u32 one = floats_to_acts(1.f, 1.f), ones[4] = {one, one, one, one};
      UNROLL for (int m = 0; m < MT; m++) {
        UNROLL for (int k = 0; k < 4; k++) xsum[m][k] = 0.f;
        UNROLL for (int half = 0; half < 4; half++)
          UNROLL for (int j = 0; j < 2; j++) mma(xsum[m], ones, word(x[half][m], 2 * j), word(x[half][m], 2 * j + 1));
      }
#endif
      UNROLL for (int n = 0; n < NT; n++) {
        uint4 codes[2 * LOADS];
        UNROLL for (int i = 0; i < 2 * LOADS; i++)
          codes[i] = *(const uint4*)(shared + CODES_AT + slot * CODE_BYTES + (i / 2 * NT + n) * 1024 + i % 2 * 512 +
                                     unit_place(lane) * 16);
        UNROLL for (int group = 0; group < SCALES; group++) {
#if ASYM && GROUP
          const u32 zeros = *(const u16*)(shared + ZEROS_AT + place(slot, n, ZERO_BYTES) + (group * 8 + g) * 2);
#elif ASYM
          const u32 zeros = channel_zeros[n];
#else
          const u32 zeros = (1u << (WEIGHT_BITS - 1)) * 0x101u;
#endif
#if !SUMS_AS_CODED
          const ZeroPoint z0 = zero_point(zeros & 255), z1 = zero_point(zeros >> 8);
#endif
#if GROUP
          float part[MT][4];
          UNROLL for (int m = 0; m < MT; m++)
            UNROLL for (int k = 0; k < 4; k++) part[m][k] = 0.f;
#else
          float (&part)[MT][4] = sum[n];
#endif
          UNROLL for (int half = group * HALVES; half < (group + 1) * HALVES; half++)   // 32 columns
            UNROLL for (int j = 0; j < 2; j++) {                                        // 16 columns
              u32 a[4];
#if WEIGHT_BITS == 8
              bytes_to_acts(word(codes[half], 2 * j), z0, z1, a[0], a[1]);
              bytes_to_acts(word(codes[half], 2 * j + 1), z0, z1, a[2], a[3]);
#else
              const int shift = 8 * (half & 1);
              const u32 q0 = word(codes[half >> 1], 2 * j) >> shift, q1 = word(codes[half >> 1], 2 * j + 1) >> shift;
#if SUMS_AS_CODED
              pairs_to_coded(q0, q1, a);
#else
              pairs_to_acts(q0, q1, z0, z1, a);
#endif
#endif
              UNROLL for (int m = 0; m < MT; m++) mma(part[m], a, word(x[half][m], 2 * j), word(x[half][m], 2 * j + 1));
            }
#if GROUP
          const u32 pair = *(const u32*)(shared + SCALES_AT + place(slot, n, SCALE_BYTES) + (group * 8 + g) * 4);
          UNROLL for (int m = 0; m < MT; m++)
            UNROLL for (int k = 0; k < 4; k++) {
#if SUMS_AS_CODED
              part[m][k] -= (POWER + (float)(k < 2 ? zeros & 255 : zeros >> 8)) * xsum[m][k];
#endif
              sum[n][m][k] += scale_of(pair, k >> 1) * part[m][k];
            }
#endif
        }
      }
      __syncwarp();                                      // all lanes have read the slot
      const int next = step + PF * KW;
      if (lane == 0 && next < steps) {
        copy_weights(p, next);
        copy_x(p, next);
      }
    }
  }

  __syncthreads();                                       // all rings have been read: their memory takes the sums
  float* partial = (float*)shared;
  const int outputs = M * LD;
  UNROLL for (int n = 0; n < NT; n++)
    UNROLL for (int m = 0; m < MT; m++)
      UNROLL for (int k = 0; k < 4; k++) {
        const int token = m * 8 + t + (k & 1) * 4, row = n * 16 + g + (k >> 1) * 8;
        if (token < M) partial[warp * outputs + token * LD + row] = sum[n][m][k];
      }
  __syncthreads();

  // The product of a token and row n of the weight, `row` of the block's.
  auto product = [&](int token, int row, int n) {
    float v = 0.f;
    UNROLL for (int j = 0; j < KW; j++) v += partial[j * outputs + token * LD + row];
#if !GROUP
    v *= __ldg((const float*)S + n);
#endif
    return v;
  };
  const int rows = ROWS / PARTS, width = N / PARTS;      // of the result
  for (int i = threadIdx.x; i < M * rows; i += KW * 32) {
    const int token = i / rows, row = i % rows, n = blockIdx.x * rows + row;
    if (n >= width) continue;
#if GATED
    const u16 gate = float_to_act(product(token, row, n)), up = float_to_act(product(token, row + rows, n + width));
    Y[(u64)token * width + n] = float_to_act(gated(act_to_float(gate), act_to_float(up)));   // as silu.cu would
#else
    Y[(u64)token * width + n] = float_to_act(product(token, row, n));
#endif
  }
}
