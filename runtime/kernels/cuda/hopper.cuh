// The warpgroup matrix product of Hopper for one width; before gemm.cu and flash.cu.
//
// d [64, WIDTH] += a b (ADD false: d = a b); a: this warp's 16 rows of 32 bytes; b: descriptor of [WIDTH, 32 bytes] in
// shared memory, 128-byte swizzle, K contiguous; TURNED (16 bits): of [16, WIDTH], WIDTH contiguous.
// Macros: WIDTH a multiple of 16 up to 256 (TOKENS unless given); ACT_BITS; BF16.

#ifndef WIDTH
#define WIDTH TOKENS
#endif
#define SUM4(C, j) C(d[j][0]), C(d[j][1]), C(d[j][2]), C(d[j][3])
#define SUM8(C, j) SUM4(C, j), SUM4(C, j + 1)
#define SUM16(C, j) SUM8(C, j), SUM8(C, j + 2)
#define SUM32(C, j) SUM16(C, j), SUM16(C, j + 4)
#define SUM64(C, j) SUM32(C, j), SUM32(C, j + 8)
#define NAMES0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES1 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES2 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define NAMES3 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES4 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define NAMES5 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define NAMES6 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define NAMES7 "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define HALF1 "%16, %17, %18, %19, %20, %21, %22, %23"
#define HALF2 "%32, %33, %34, %35, %36, %37, %38, %39"
#define HALF3 "%48, %49, %50, %51, %52, %53, %54, %55"
#define HALF4 "%64, %65, %66, %67, %68, %69, %70, %71"
#define HALF5 "%80, %81, %82, %83, %84, %85, %86, %87"
#define HALF6 "%96, %97, %98, %99, %100, %101, %102, %103"
#define HALF7 "%112, %113, %114, %115, %116, %117, %118, %119"
#if WIDTH == 16
#define SUMS(C) SUM8(C, 0)
#define NAMES "%0, %1, %2, %3, %4, %5, %6, %7"
#define OPERANDS "{%8, %9, %10, %11}, %12, %13"
#define TURN "%14"
#elif WIDTH == 32
#define SUMS(C) SUM16(C, 0)
#define NAMES NAMES0
#define OPERANDS "{%16, %17, %18, %19}, %20, %21"
#define TURN "%22"
#elif WIDTH == 48
#define SUMS(C) SUM16(C, 0), SUM8(C, 4)
#define NAMES NAMES0 ", " HALF1
#define OPERANDS "{%24, %25, %26, %27}, %28, %29"
#define TURN "%30"
#elif WIDTH == 64
#define SUMS(C) SUM32(C, 0)
#define NAMES NAMES0 ", " NAMES1
#define OPERANDS "{%32, %33, %34, %35}, %36, %37"
#define TURN "%38"
#elif WIDTH == 80
#define SUMS(C) SUM32(C, 0), SUM8(C, 8)
#define NAMES NAMES0 ", " NAMES1 ", " HALF2
#define OPERANDS "{%40, %41, %42, %43}, %44, %45"
#define TURN "%46"
#elif WIDTH == 96
#define SUMS(C) SUM32(C, 0), SUM16(C, 8)
#define NAMES NAMES0 ", " NAMES1 ", " NAMES2
#define OPERANDS "{%48, %49, %50, %51}, %52, %53"
#define TURN "%54"
#elif WIDTH == 112
#define SUMS(C) SUM32(C, 0), SUM16(C, 8), SUM8(C, 12)
#define NAMES NAMES0 ", " NAMES1 ", " NAMES2 ", " HALF3
#define OPERANDS "{%56, %57, %58, %59}, %60, %61"
#define TURN "%62"
#elif WIDTH == 128
#define SUMS(C) SUM64(C, 0)
#define NAMES NAMES0 ", " NAMES1 ", " NAMES2 ", " NAMES3
#define OPERANDS "{%64, %65, %66, %67}, %68, %69"
#define TURN "%70"
#elif WIDTH == 144
#define SUMS(C) SUM64(C, 0), SUM8(C, 16)
#define NAMES NAMES0 ", " NAMES1 ", " NAMES2 ", " NAMES3 ", " HALF4
#define OPERANDS "{%72, %73, %74, %75}, %76, %77"
#define TURN "%78"
#elif WIDTH == 160
#define SUMS(C) SUM64(C, 0), SUM16(C, 16)
#define NAMES NAMES0 ", " NAMES1 ", " NAMES2 ", " NAMES3 ", " NAMES4
#define OPERANDS "{%80, %81, %82, %83}, %84, %85"
#define TURN "%86"
#elif WIDTH == 176
#define SUMS(C) SUM64(C, 0), SUM16(C, 16), SUM8(C, 20)
#define NAMES NAMES0 ", " NAMES1 ", " NAMES2 ", " NAMES3 ", " NAMES4 ", " HALF5
#define OPERANDS "{%88, %89, %90, %91}, %92, %93"
#define TURN "%94"
#elif WIDTH == 192
#define SUMS(C) SUM64(C, 0), SUM32(C, 16)
#define NAMES NAMES0 ", " NAMES1 ", " NAMES2 ", " NAMES3 ", " NAMES4 ", " NAMES5
#define OPERANDS "{%96, %97, %98, %99}, %100, %101"
#define TURN "%102"
#elif WIDTH == 208
#define SUMS(C) SUM64(C, 0), SUM32(C, 16), SUM8(C, 24)
#define NAMES NAMES0 ", " NAMES1 ", " NAMES2 ", " NAMES3 ", " NAMES4 ", " NAMES5 ", " HALF6
#define OPERANDS "{%104, %105, %106, %107}, %108, %109"
#define TURN "%110"
#elif WIDTH == 224
#define SUMS(C) SUM64(C, 0), SUM32(C, 16), SUM16(C, 24)
#define NAMES NAMES0 ", " NAMES1 ", " NAMES2 ", " NAMES3 ", " NAMES4 ", " NAMES5 ", " NAMES6
#define OPERANDS "{%112, %113, %114, %115}, %116, %117"
#define TURN "%118"
#elif WIDTH == 240
#define SUMS(C) SUM64(C, 0), SUM32(C, 16), SUM16(C, 24), SUM8(C, 28)
#define NAMES NAMES0 ", " NAMES1 ", " NAMES2 ", " NAMES3 ", " NAMES4 ", " NAMES5 ", " NAMES6 ", " HALF7
#define OPERANDS "{%120, %121, %122, %123}, %124, %125"
#define TURN "%126"
#elif WIDTH == 256
#define SUMS(C) SUM64(C, 0), SUM64(C, 16)
#define NAMES NAMES0 ", " NAMES1 ", " NAMES2 ", " NAMES3 ", " NAMES4 ", " NAMES5 ", " NAMES6 ", " NAMES7
#define OPERANDS "{%128, %129, %130, %131}, %132, %133"
#define TURN "%134"
#endif

#define STRING_(x) #x
#define STRING(x) STRING_(x)
#if ACT_BITS == 8                                        // 32 columns, exact
#define WGMMA "wgmma.mma_async.sync.aligned.m64n" STRING(WIDTH) "k32.s32.s8.s8 {" NAMES "}, " OPERANDS ";"
#define PLACE "+r"
typedef int Partial;
#else                                                    // 16 columns, float32
#if BF16
#define WGMMA_TYPE "bf16.bf16"
#else
#define WGMMA_TYPE "f16.f16"
#endif
#define WGMMA \
  "wgmma.mma_async.sync.aligned.m64n" STRING(WIDTH) "k16.f32." WGMMA_TYPE " {" NAMES "}, " OPERANDS ", 1, 1, " TURN ";"
#define PLACE "+f"
typedef float Partial;
#endif

template <bool ADD = true, bool TURNED = false>
DEVICE void wgmma(Partial (&d)[WIDTH / 8][4], const u32 (&a)[4], u64 b) {
  asm volatile(WGMMA : SUMS(PLACE) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"((int)ADD), "n"((int)TURNED));
}

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Sums d are complete then, and no use of them comes before, which the compiler would not know.
template <int PENDING> DEVICE void wgmma_wait_for(Partial (&d)[WIDTH / 8][4]) {
  wgmma_wait<PENDING>();
#pragma unroll
  for (int j = 0; j < WIDTH / 8; j++) asm volatile("" : SUM4(PLACE, j));
}
