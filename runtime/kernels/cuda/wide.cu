// y [M, N] = x [M, K] @ weight.T for tens to hundreds of tokens, on Hopper's warpgroup tensor cores.
//
// As in skinny.cu the weights are the A operand and come from registers: each warp of a warpgroup turns its 16 rows of
// a chunk into fragments, and wgmma multiplies them with TOKENS tokens in shared memory, which all warpgroups of the
// block share. Bulk copies bring them into a ring of STAGES chunks and signal barriers; arrange.cu has put them into the
// order of the weights' columns. Group scales multiply the weights in the activations' type; sums are float32. A cluster
// of SK blocks splits K.
//
// Macros: WEIGHT_BITS 4 | 8; ACT_BITS 16; BF16; SCALE_BF16; GROUP; ASYM as in skinny.cu; TOKENS 16 | 32 | 64 | 128 of
//   a block; WG: warpgroups of a block; NT: 64-row tiles of a warpgroup; SK; PF: chunks whose weights are in flight,
//   even; STAGES > PF; MINB.

#define LOADS (WEIGHT_BITS / 4)
#define SCALES (GROUP == 32 ? 2 : 1)                     // scale groups of a chunk
#define THREADS (WG * 128)
#define ROWS (WG * NT * 64)                              // of a block
#define STAGE_BYTES (TOKENS * 128)
#define LD (ROWS + 4)                                    // floats from token to token: no bank conflicts
#define UNROLL _Pragma("unroll")
#if BF16
#define WGMMA_TYPE "bf16.bf16"
#else
#define WGMMA_TYPE "f16.f16"
#endif

// d [64, TOKENS] += a [64, 16] b [16, TOKENS]; b: descriptor of shared memory, 128-byte swizzle, K contiguous.
DEVICE void wgmma(float (&d)[TOKENS / 8][4], const u32 (&a)[4], u64 b) {
#if TOKENS == 16
  asm volatile("wgmma.mma_async.sync.aligned.m64n16k16.f32." WGMMA_TYPE " {"
               "%0, %1, %2, %3, %4, %5, %6, %7}, "
               "{%8, %9, %10, %11}, %12, 1, 1, 1, 0;"
               : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#elif TOKENS == 32
  asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32." WGMMA_TYPE " {"
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
               "{%16, %17, %18, %19}, %20, 1, 1, 1, 0;"
               : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),
                 "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#elif TOKENS == 64
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." WGMMA_TYPE " {"
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
               "{%32, %33, %34, %35}, %36, 1, 1, 1, 0;"
               : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),
                 "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
                 "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
                 "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#elif TOKENS == 128
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." WGMMA_TYPE " {"
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
               "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
               "{%64, %65, %66, %67}, %68, 1, 1, 1, 0;"
               : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),
                 "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
                 "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
                 "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]),
                 "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]), "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]),
                 "+f"(d[10][0]), "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3]),
                 "+f"(d[12][0]), "+f"(d[12][1]), "+f"(d[12][2]), "+f"(d[12][3]), "+f"(d[13][0]), "+f"(d[13][1]), "+f"(d[13][2]), "+f"(d[13][3]),
                 "+f"(d[14][0]), "+f"(d[14][1]), "+f"(d[14][2]), "+f"(d[14][3]), "+f"(d[15][0]), "+f"(d[15][1]), "+f"(d[15][2]), "+f"(d[15][3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#endif
}

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }

DEVICE void barrier_init(u32 barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
DEVICE void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
DEVICE void barrier_wait(u32 barrier, u32 parity) {
  asm volatile("{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
               "@!done bra again;\n}" ::"r"(barrier), "r"(parity) : "memory");
}
// Brings `bytes` to shared memory; the barrier completes a phase when they have arrived.
DEVICE void bulk_copy(u32 to, const u8* from, u32 bytes, u32 barrier) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

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

// W, S, Z as in skinny.cu; X as from arrange.cu. Grid: SK (one cluster), token blocks, row blocks.
extern "C" __global__ void __launch_bounds__(THREADS, MINB)
wide(const uint4* __restrict__ W, const void* __restrict__ S, const u16* __restrict__ Z, const u8* X, u16* Y,
     int M, int N, int chunks) {
  pdl_launch_dependents();
  extern __shared__ __align__(1024) u8 shared[];         // STAGES chunks of x; afterwards partial sums [TOKENS][LD]
  __shared__ __align__(8) u64 full[STAGES], empty[STAGES];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int rank = blockIdx.x, first_token = blockIdx.y * TOKENS, tiles = (N + 15) >> 4;
  const int begin = (int)((long long)chunks * rank / SK), count = (int)((long long)chunks * (rank + 1) / SK) - begin;
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
  auto fetch = [&](int i) {                              // the i-th chunk of this block
    bulk_copy(stages + i % STAGES * STAGE_BYTES, X + ((u64)blockIdx.y * chunks + begin + i) * STAGE_BYTES, STAGE_BYTES,
              full_at + 8 * (i % STAGES));
  };

  const uint4* codes[NT];
#if GROUP || ASYM
  u32 pair_at[NT];                                       // of the tile's first scale pair
#endif
  UNROLL for (int n = 0; n < NT; n++) {
    const int tile = min((((int)blockIdx.z * WG + (warp >> 2)) * NT + n) * 4 + (warp & 3), tiles - 1);
    codes[n] = W + (u64)tile * chunks * (LOADS * 32) + lane;
#if GROUP
    pair_at[n] = (u32)tile * (chunks * 64 / GROUP) * 8 + g;
#elif ASYM
    pair_at[n] = (u32)tile * 8 + g;
#endif
  }
  Slot slots[PF];
  auto load_slot = [&](Slot& slot, int i) {
    const int chunk = begin + i;
    UNROLL for (int n = 0; n < NT; n++) {
      UNROLL for (int k = 0; k < LOADS; k++)
        slot.codes[n][k] = load_weights(codes[n] + (u32)chunk * (LOADS * 32) + k * 32);
#if GROUP
      UNROLL for (int k = 0; k < SCALES; k++) {
        const u32 at = pair_at[n] + (u32)((chunk * 64 + k * 32) / GROUP) * 8;
        slot.scales[n][k] = __ldg((const u32*)S + at);
#if ASYM
        slot.zeros[n][k] = __ldg(Z + at);
#endif
      }
#endif
    }
  };
  UNROLL for (int p = 0; p < PF; p++)
    if (p < count) load_slot(slots[p], p);
#if ASYM && !GROUP
  u32 channel_zeros[NT];
  UNROLL for (int n = 0; n < NT; n++) channel_zeros[n] = __ldg(Z + pair_at[n]);
#endif
  pdl_wait();
  if (threadIdx.x == 0)
    for (int i = 0; i < min(STAGES, count); i++) fetch(i);

  float sum[NT][TOKENS / 8][4];
  UNROLL for (int n = 0; n < NT; n++)
    UNROLL for (int j = 0; j < TOKENS / 8; j++)
      UNROLL for (int k = 0; k < 4; k++) sum[n][j][k] = 0.f;

  // Makes the fragments of one chunk while the last one's multiply, then sends them to the tensor cores.
  auto multiply = [&](u32 (&a)[NT][4][4], Slot& slot, int i) {
    UNROLL for (int n = 0; n < NT; n++)
      UNROLL for (int s = 0; s < 4; s++) {               // 16 columns
        u32 (&f)[4] = a[n][s];
#if GROUP
        const int group = GROUP == 32 ? s >> 1 : 0;
#endif
#if !ASYM
        const ZeroPoint z0 = zero_point(1u << (WEIGHT_BITS - 1)), z1 = z0;
#elif GROUP
        const ZeroPoint z0 = zero_point(slot.zeros[n][group] & 255), z1 = zero_point(slot.zeros[n][group] >> 8);
#else
        const ZeroPoint z0 = zero_point(channel_zeros[n] & 255), z1 = zero_point(channel_zeros[n] >> 8);
#endif
#if WEIGHT_BITS == 4
        codes_to_acts(word(slot.codes[n][0], s), z0, z1, f);
#else
        bytes_to_acts(word(slot.codes[n][s >> 1], 2 * (s & 1)), z0, f[0], f[2]);
        bytes_to_acts(word(slot.codes[n][s >> 1], 2 * (s & 1) + 1), z1, f[1], f[3]);
#endif
#if GROUP
        const u32 s0 = scale_pair(slot.scales[n][group], 0), s1 = scale_pair(slot.scales[n][group], 1);
        f[0] = mul2(f[0], s0);
        f[1] = mul2(f[1], s1);
        f[2] = mul2(f[2], s0);
        f[3] = mul2(f[3], s1);
#endif
      }
    if (i + PF < count) load_slot(slot, i + PF);
    barrier_wait(full_at + 8 * (i % STAGES), (i / STAGES) & 1);
    // Start address, leading offset (unused), 1024 bytes from 8 tokens to the next 8, 128-byte swizzle.
    const u64 b = (u64)((stages + i % STAGES * STAGE_BYTES) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
    wgmma_fence();
    UNROLL for (int s = 0; s < 4; s++)
      UNROLL for (int n = 0; n < NT; n++) wgmma(sum[n], a[n][s], b + s * 2);
    wgmma_commit();
  };

  // No branch leaves the pipelined loop, or the compiler would not let products overlap.
  u32 a[2][NT][4][4];
  int base = 0;
  for (; base + PF <= count; base += PF)
    UNROLL for (int p = 0; p < PF; p++) {
      const int i = base + p;
      multiply(a[p & 1], slots[p], i);
      wgmma_wait<1>();                                   // this warp is done with the chunk before this one
      if (i > 0 && lane == 0) barrier_arrive(empty_at + 8 * ((i - 1) % STAGES));
      if (threadIdx.x == 0 && i > 1 && i - 2 + STAGES < count) {   // and the others most likely with the one before that
        barrier_wait(empty_at + 8 * ((i - 2) % STAGES), ((i - 2) / STAGES) & 1);
        fetch(i - 2 + STAGES);
      }
      __syncwarp();
    }
  wgmma_wait<0>();
  UNROLL for (int p = 0; p < PF; p++)                    // fewer than PF chunks remain; STAGES > PF: they are on their way
    if (base + p < count) {
      multiply(a[0], slots[p], base + p);
      wgmma_wait<0>();
    }
  __syncthreads();                                       // every stage has been read: their memory takes the sums

  float* partial = (float*)shared;
  UNROLL for (int n = 0; n < NT; n++)
    UNROLL for (int j = 0; j < TOKENS / 8; j++)
      UNROLL for (int k = 0; k < 4; k++) {
        const int token = j * 8 + t * 2 + (k & 1), row = (((warp >> 2) * NT + n) * 4 + (warp & 3)) * 16 + g + (k >> 1) * 8;
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
