// y [M, N] = x [M, K] @ weight.T for tens to hundreds of tokens, on Hopper's warpgroup tensor cores.
//
// As in skinny.cu the weights are the A operand and come from registers: each warp of a warpgroup turns its 16 rows of
// a chunk into fragments, and wgmma multiplies them with TOKENS tokens in shared memory, which all warpgroups of the
// block share. Columns of x are put into the weights' order on their way to shared memory. Group scales multiply the
// weights in the activations' type; sums are float32. A cluster of SK blocks splits K.
//
// Macros: WEIGHT_BITS 4 | 8; ACT_BITS 16; BF16; SCALE_BF16; GROUP; ASYM as in skinny.cu; TOKENS 32 | 64 | 128 of a
//   block; WG: warpgroups of a block; NT: 64-row tiles of a warpgroup; SK; PF: chunks in flight; MINB.

#define LOADS (WEIGHT_BITS / 4)
#define SCALES (GROUP == 32 ? 2 : 1)                     // scale groups of a chunk
#define THREADS (WG * 128)
#define ROWS (WG * NT * 64)                              // of a block
#define XLOADS ((TOKENS * 8 + THREADS - 1) / THREADS)    // 16-byte loads of a thread for TOKENS x 64 columns
#define XSTAGE (TOKENS * 128)                            // bytes
#define LD (ROWS + 4)                                    // floats from token to token: no bank conflicts
#define UNROLL _Pragma("unroll")
#if BF16
#define WGMMA_TYPE "bf16.bf16"
#else
#define WGMMA_TYPE "f16.f16"
#endif

// d [64, TOKENS] (+)= a [64, 16] b [16, TOKENS]; b: descriptor of shared memory, 128-byte swizzle, K contiguous.
DEVICE void wgmma(float (&d)[TOKENS / 8][4], const u32 (&a)[4], u64 b, int accumulate) {
#if TOKENS == 32
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n32k16.f32." WGMMA_TYPE " {"
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
               "{%16, %17, %18, %19}, %20, p, 1, 1, 0;\n}\n"
               : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),
                 "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
#elif TOKENS == 64
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n64k16.f32." WGMMA_TYPE " {"
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
               "{%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}\n"
               : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),
                 "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
                 "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
                 "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
#elif TOKENS == 128
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n128k16.f32." WGMMA_TYPE " {"
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
               "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
               "{%64, %65, %66, %67}, %68, p, 1, 1, 0;\n}\n"
               : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),
                 "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
                 "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
                 "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]),
                 "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]), "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]),
                 "+f"(d[10][0]), "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3]),
                 "+f"(d[12][0]), "+f"(d[12][1]), "+f"(d[12][2]), "+f"(d[12][3]), "+f"(d[13][0]), "+f"(d[13][1]), "+f"(d[13][2]), "+f"(d[13][3]),
                 "+f"(d[14][0]), "+f"(d[14][1]), "+f"(d[14][2]), "+f"(d[14][3]), "+f"(d[15][0]), "+f"(d[15][1]), "+f"(d[15][2]), "+f"(d[15][3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
#endif
}

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

struct Slot {                                            // one chunk's weights of one warp, on their way
  uint4 codes[NT][LOADS];
#if GROUP
  u32 scales[NT][SCALES];
#if ASYM
  u32 zeros[NT][SCALES];
#endif
#endif
};

// The scale of row g (row = 0) or g + 8 (1) twice, in the activations' type.
DEVICE u32 scale_pair(u32 scales, int row) {
  const u32 s = row ? scales >> 16 : scales & 0xffff;
#if SCALE_BF16 == BF16
  return s | (s << 16);
#elif SCALE_BF16
  const float f = bf16_to_float(s);
  return floats_to_acts(f, f);
#else
  const float f = half_to_float(s);
  return floats_to_acts(f, f);
#endif
}

// W, S, Z as in skinny.cu; X [M, 64 chunks]. Grid: SK (one cluster), token blocks, row blocks.
extern "C" __global__ void __launch_bounds__(THREADS, MINB)
wide(const uint4* __restrict__ W, const void* __restrict__ S, const u16* __restrict__ Z, const u8* X, u16* Y,
     int M, int N, int chunks) {
  pdl_launch_dependents();
  extern __shared__ __align__(1024) u8 shared[];         // two stages of x; afterwards partial sums [TOKENS][LD]
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int warp = (threadIdx.x >> 5) & 3, warpgroup = threadIdx.x >> 7;
  const int rank = blockIdx.x, first_token = blockIdx.y * TOKENS, tiles = (N + 15) >> 4;
  const int begin = (int)((long long)chunks * rank / SK), end = (int)((long long)chunks * (rank + 1) / SK);

  const uint4* codes[NT];
  u32 pair_at[NT];                                       // of the tile's first scale pair
  UNROLL for (int n = 0; n < NT; n++) {
    const int tile = min(((int)blockIdx.z * (WG * NT) + warpgroup * NT + n) * 4 + warp, tiles - 1);
    codes[n] = W + (u64)tile * chunks * (LOADS * 32) + lane;
#if GROUP
    pair_at[n] = (u32)tile * (chunks * 64 / GROUP) * 8 + g;
#else
    pair_at[n] = tile * 8 + g;
#endif
  }

  Slot slots[PF];
  uint4 x[PF][XLOADS];
  auto load_weights_of = [&](Slot& slot, int chunk) {
    UNROLL for (int n = 0; n < NT; n++) {
      UNROLL for (int i = 0; i < LOADS; i++)
        slot.codes[n][i] = load_weights(codes[n] + (u32)chunk * (LOADS * 32) + i * 32);
#if GROUP
      UNROLL for (int i = 0; i < SCALES; i++) {
        const u32 at = pair_at[n] + (u32)((chunk * 64 + i * 32) / GROUP) * 8;
        slot.scales[n][i] = __ldg((const u32*)S + at);
#if ASYM
        slot.zeros[n][i] = __ldg(Z + at);
#endif
      }
#endif
    }
  };
  auto load_x = [&](uint4 (&to)[XLOADS], int chunk) {    // tokens past the last one repeat it
    UNROLL for (int i = 0; i < XLOADS; i++) {
      const int piece = threadIdx.x + i * THREADS;
      const int token = min(first_token + min(piece >> 3, TOKENS - 1), M - 1);
      to[i] = load_activations(X + ((u64)token * chunks + chunk) * 128 + (piece & 7) * 16);
    }
  };
  auto store_x = [&](const uint4 (&from)[XLOADS], int stage) {
    UNROLL for (int i = 0; i < XLOADS; i++) {
      const int piece = threadIdx.x + i * THREADS, token = piece >> 3, h = (piece >> 2) & 1, part = piece & 3;
      if (TOKENS * 8 % THREADS == 0 || token < TOKENS) {
        u8* row = shared + stage * XSTAGE + token * 128 + part * 4;
        UNROLL for (int k = 0; k < 4; k++) *(u32*)(row + (((4 * h + k) ^ (token & 7)) << 4)) = word(from[i], k);
      }
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  };

  UNROLL for (int p = 0; p < PF; p++)
    if (begin + p < end) load_weights_of(slots[p], begin + p);
#if ASYM && !GROUP
  u32 channel_zeros[NT];
  UNROLL for (int n = 0; n < NT; n++) channel_zeros[n] = __ldg(Z + pair_at[n]);
#endif
  pdl_wait();
  UNROLL for (int p = 0; p < PF; p++)
    if (begin + p < end) load_x(x[p], begin + p);
  if (begin < end) {
    store_x(x[0], 0);
    if (begin + PF < end) load_x(x[0], begin + PF);
  }
  __syncthreads();

  float sum[NT][TOKENS / 8][4];
  UNROLL for (int n = 0; n < NT; n++)
    UNROLL for (int j = 0; j < TOKENS / 8; j++)
      UNROLL for (int k = 0; k < 4; k++) sum[n][j][k] = 0.f;

  const u32 base_address = (u32)__cvta_generic_to_shared(shared);
  for (int base = begin; base < end; base += PF) {
    UNROLL for (int p = 0; p < PF; p++) {
      const int chunk = base + p;
      if (chunk >= end) break;
      const int stage = (chunk - begin) & 1;
      Slot& slot = slots[p];
      // Start address, leading offset (unused), 1024 bytes from 8 tokens to the next 8, 128-byte swizzle.
      const u64 b = (u64)((base_address + stage * XSTAGE) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
      UNROLL for (int n = 0; n < NT; n++) {
        u32 a[4][4];
        UNROLL for (int s = 0; s < 4; s++) {             // 16 columns
          const int group = GROUP == 32 ? s >> 1 : 0;
#if !ASYM
          const ZeroPoint z0 = zero_point(1u << (WEIGHT_BITS - 1)), z1 = z0;
#elif GROUP
          const ZeroPoint z0 = zero_point(slot.zeros[n][group] & 255), z1 = zero_point(slot.zeros[n][group] >> 8);
#else
          const ZeroPoint z0 = zero_point(channel_zeros[n] & 255), z1 = zero_point(channel_zeros[n] >> 8);
#endif
#if WEIGHT_BITS == 4
          codes_to_acts(word(slot.codes[n][0], s), z0, z1, a[s]);
#else
          bytes_to_acts(word(slot.codes[n][s >> 1], 2 * (s & 1)), z0, a[s][0], a[s][2]);
          bytes_to_acts(word(slot.codes[n][s >> 1], 2 * (s & 1) + 1), z1, a[s][1], a[s][3]);
#endif
#if GROUP
          const u32 s0 = scale_pair(slot.scales[n][group], 0), s1 = scale_pair(slot.scales[n][group], 1);
          a[s][0] = mul2(a[s][0], s0);
          a[s][1] = mul2(a[s][1], s1);
          a[s][2] = mul2(a[s][2], s0);
          a[s][3] = mul2(a[s][3], s1);
#endif
        }
        wgmma_fence();
        UNROLL for (int s = 0; s < 4; s++) wgmma(sum[n], a[s], b + s * 2, 1);
        wgmma_commit();
      }
      if (chunk + PF < end) load_weights_of(slot, chunk + PF);
      if (chunk + 1 < end) {
        store_x(x[(p + 1) % PF], stage ^ 1);
        if (chunk + 1 + PF < end) load_x(x[(p + 1) % PF], chunk + 1 + PF);
      }
      wgmma_wait();
      __syncthreads();
    }
  }

  float* partial = (float*)shared;
  UNROLL for (int n = 0; n < NT; n++)
    UNROLL for (int j = 0; j < TOKENS / 8; j++)
      UNROLL for (int k = 0; k < 4; k++) {
        const int token = j * 8 + t * 2 + (k & 1), row = ((warpgroup * NT + n) * 4 + warp) * 16 + g + (k >> 1) * 8;
        partial[token * LD + row] = sum[n][j][k];
      }
  if (SK > 1) cluster_sync(); else __syncthreads();
  const int tokens = min(TOKENS, M - first_token);
  for (int i = rank * THREADS + threadIdx.x; i < tokens * ROWS; i += SK * THREADS) {
    const int token = i / ROWS, row = i % ROWS, n = blockIdx.z * ROWS + row;
    float v = 0.f;
    const u32 at = (u32)__cvta_generic_to_shared(partial + token * LD + row);
    UNROLL for (int j = 0; j < SK; j++) v += SK > 1 ? cluster_load(at, j) : partial[token * LD + row];
    if (n < N) {
#if !GROUP
      v *= __ldg((const float*)S + n);
#endif
      Y[(u64)(first_token + token) * N + n] = float_to_act(v);
    }
  }
  if (SK > 1) cluster_sync();                            // nobody leaves while its sums are being read
}
