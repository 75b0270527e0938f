// Shared by every kernel of this folder; prepended to its source, so nothing is included and NVRTC needs no headers.
// Macros: BF16 = 1 where activations and outputs are bfloat16, 0 for float16.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE __device__ __forceinline__

// ---- programmatic dependent launch and thread-block clusters (Hopper and later) ----------------------------------

// Lets the next kernel of the stream start; what it may touch before our stores are visible is its own affair.
DEVICE void pdl_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Waits until every kernel before this one has finished and its stores are visible.
DEVICE void pdl_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

#if __CUDA_ARCH__ >= 900
DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The same in two steps, without making memory visible.
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

// Shared address `address` of block `rank` of this cluster.
DEVICE u32 at_block(u32 address, int rank) {
  u32 remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}

// The float there.
DEVICE float cluster_load(u32 address, int rank) {
  float value;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(at_block(address, rank)));
  return value;
}
#endif

// ---- memory ------------------------------------------------------------------------------------------------------

// Weights are read once: keep them out of L1.
DEVICE uint4 load_weights(const uint4* p) {
  uint4 r;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(p));
  return r;
}

// Activations may come from the kernel before us, so they never take the read-only path.
DEVICE uint4 load_activations(const void* p) {
  uint4 r;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(p));
  return r;
}

// Where a lane's 16 bytes lie among those of its warp (layout.py).
DEVICE int unit_place(int lane) { return lane ^ (lane >> 3); }

DEVICE u32 word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// ---- 16-bit floats in 32-bit words -------------------------------------------------------------------------------

DEVICE float half_to_float(u32 h) { float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"((u16)h)); return f; }
DEVICE float bf16_to_float(u32 h) { return __int_as_float((int)(h << 16)); }

#if BF16
DEVICE float act_to_float(u32 h) { return bf16_to_float(h); }
DEVICE u16 float_to_act(float f) { u16 h; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(f)); return h; }
DEVICE u32 floats_to_acts(float low, float high) {
  u32 r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low)); return r;
}
DEVICE u32 mul2(u32 a, u32 b) {
  u32 r; asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(0x80008000u)); return r;
}
#else
DEVICE float act_to_float(u32 h) { return half_to_float(h & 0xffff); }
DEVICE u16 float_to_act(float f) { u16 h; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f)); return h; }
DEVICE u32 floats_to_acts(float low, float high) {
  u32 r; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low)); return r;
}
DEVICE u32 mul2(u32 a, u32 b) { u32 r; asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
#endif
DEVICE u32 half_sub2(u32 a, u32 b) { u32 r; asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
DEVICE u32 half_fma2(u32 a, u32 b, u32 c) {
  u32 r; asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c)); return r;
}
DEVICE u32 bf16_fma2(u32 a, u32 b, u32 c) {
  u32 r; asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c)); return r;
}
// In the activations' type.
DEVICE u32 fma2(u32 a, u32 b, u32 c) { return BF16 ? bf16_fma2(a, b, c) : half_fma2(a, b, c); }
DEVICE u32 twice(float v) { return floats_to_acts(v, v); }
// (a & mask) | bits in one instruction.
DEVICE u32 mask_or(u32 a, u32 mask, u32 bits) {
  u32 r; asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(a), "r"(mask), "r"(bits)); return r;
}

#ifdef SCALE_BF16
// The scale of row g (row = 0) or g + 8 (1) of a pair.
DEVICE float scale_of(u32 pair, int row) {
#if SCALE_BF16
  return row ? __int_as_float((int)(pair & 0xffff0000u)) : bf16_to_float(pair);
#else
  return half_to_float(row ? pair >> 16 : pair & 0xffff);
#endif
}
#endif

// Exact for |i| < 2^22, and faster than the conversion instruction: i into the mantissa of 1.5 x 2^23.
DEVICE float small_int_to_float(int i) { return __int_as_float(i + 0x4b400000) - 12582912.f; }

// ---- codes to activations' 16-bit format, exactly ----------------------------------------------------------------
// A code is set into the low mantissa bits of a power of two, and that power plus the zero point subtracted
// (the fast conversion of Kim et al. 2022, arXiv 2211.10017).

// The zero point of one row in the form that `pairs_to_acts` and `bytes_to_acts` subtract.
struct ZeroPoint { u32 low, high; };

DEVICE ZeroPoint zero_point(u32 z) {
  ZeroPoint r;
  r.high = 0;
#if BF16 && WEIGHT_BITS == 8
  r.low = floats_to_acts(128.f - (float)z, 128.f - (float)z);
#elif BF16
  r.low = 0xc300c300u | z | (z << 16);            // -(128 + z)
#else
  r.low = 0x64006400u | z | (z << 16);            // 1024 + z
#if WEIGHT_BITS == 4
  r.high = half_sub2(0x63806380u, r.low);         // -(64 + z)
#endif
#endif
  return r;
}

#if WEIGHT_BITS == 4
// Of two words with columns 8 t + 2 v, v even and v + 1, the nibbles 0, 1, 4 and 5: the A fragment of m16n8k16 for 16 of
// the first 32 columns, rows g (a0, a2) and g + 8 (a1, a3). Shifted by 8: of the other 32 columns.
DEVICE void pairs_to_acts(u32 q0, u32 q1, ZeroPoint z0, ZeroPoint z1, u32 (&a)[4]) {
#if !BF16
  a[0] = half_sub2(mask_or(q0, 0x000f000fu, 0x64006400u), z0.low);
  a[1] = half_fma2(mask_or(q0, 0x00f000f0u, 0x64006400u), 0x2c002c00u, z1.high);   // (1024 + 16 q) / 16 - 64 - z
  a[2] = half_sub2(mask_or(q1, 0x000f000fu, 0x64006400u), z0.low);
  a[3] = half_fma2(mask_or(q1, 0x00f000f0u, 0x64006400u), 0x2c002c00u, z1.high);
#else
  a[0] = bf16_fma2(mask_or(q0, 0x000f000fu, 0x43004300u), 0x3f803f80u, z0.low);
  a[1] = bf16_fma2(mask_or(q0 >> 4, 0x000f000fu, 0x43004300u), 0x3f803f80u, z1.low);
  a[2] = bf16_fma2(mask_or(q1, 0x000f000fu, 0x43004300u), 0x3f803f80u, z0.low);
  a[3] = bf16_fma2(mask_or(q1 >> 4, 0x000f000fu, 0x43004300u), 0x3f803f80u, z1.low);
#endif
}
#else
#if BF16
// Two codes, each below the byte 0x3c. The mantissa has room for seven bits, so 2^-7 + 2^-14 (code & 127), times 2^14, less
// 256 where the eighth bit is clear and 128 where it is set: code - 128. An instruction may name one constant only.
DEVICE u32 coded_to_bf16(u32 v, [[maybe_unused]] ZeroPoint z) {
  v = bf16_fma2(v & 0xff7fff7fu, 0x46804680u, ~v & 0xff80ff80u);
#if ASYM
  v = bf16_fma2(v, 0x3f803f80u, z.low);
#endif
  return v;
}
#endif
// Two codes (bytes) of row g and two of row g + 8.
DEVICE void bytes_to_acts(u32 q, ZeroPoint z0, ZeroPoint z1, u32& a0, u32& a1) {
#if !BF16
  a0 = half_sub2(__byte_perm(q, 0x64646464u, 0x4140), z0.low);
  a1 = half_sub2(__byte_perm(q, 0x64646464u, 0x4342), z1.low);
#else
  a0 = coded_to_bf16(__byte_perm(0x3c3c3c3cu, q, 0x0504), z0);
  a1 = coded_to_bf16(__byte_perm(0x3c3c3c3cu, q, 0x0706), z1);
#endif
}
#endif

// ---- tensor cores ------------------------------------------------------------------------------------------------

DEVICE void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if BF16
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#endif
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

DEVICE void mma(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
