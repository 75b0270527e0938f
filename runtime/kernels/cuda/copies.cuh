// Hopper's copies to shared memory, and the barriers there that they signal.

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
// What other blocks of the cluster have sent is visible then.
DEVICE void barrier_wait_cluster(u32 barrier, u32 parity) {
  asm volatile("{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
               "@!done bra again;\n}" ::"r"(barrier), "r"(parity) : "memory");
}
// One arrival; the phase also waits for `bytes` of copies.
DEVICE void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Brings `bytes` (a multiple of 16) to shared memory; the barrier counts them as they arrive.
DEVICE void bulk_copy(u32 to, const u8* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

// A description of a matrix in global memory, as the driver encodes it; an argument of a kernel.
struct __align__(64) TensorMap { u64 words[16]; };

DEVICE void tensor_prefetch(const TensorMap& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }

// Brings the map's box that begins at (column, row) to shared memory; the barrier counts its bytes as they arrive.
DEVICE void tensor_copy(u32 to, const TensorMap& map, int column, int row, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
               ::"r"(to), "l"(&map), "r"(column), "r"(row), "r"(barrier) : "memory");
}
