// Fills up to four regions of device memory with zeros in one launch: what a call's results need before its kernels add to
// them. Regions may have any size and alignment. Every thread walks each region in steps of the whole grid, sixteen bytes at
// a time; the odd bytes at both ends are written one by one.

struct Regions {
  unsigned long long address[4];
  unsigned long long bytes[4];
  unsigned long long count;
};

extern "C" __global__ void __launch_bounds__(256) oeq_zero_fill(const Regions regions) {
  const unsigned long long thread = blockIdx.x * 256ull + threadIdx.x;
  const unsigned long long threads = gridDim.x * 256ull;
#pragma unroll
  for (int region = 0; region < 4; ++region) {
    if (region >= regions.count) return;
    const unsigned long long begin = regions.address[region];
    const unsigned long long end = begin + regions.bytes[region];
    unsigned long long first = (begin + 15ull) & ~15ull;
    if (first > end) first = end;
    const unsigned long long chunks = (end - first) >> 4;
    const unsigned long long last = first + (chunks << 4);
    uint4* const body = reinterpret_cast<uint4*>(first);
    for (unsigned long long chunk = thread; chunk < chunks; chunk += threads) body[chunk] = make_uint4(0u, 0u, 0u, 0u);
    // At most fifteen bytes before and fifteen behind.
    if (thread < first - begin) *reinterpret_cast<unsigned char*>(begin + thread) = 0;
    if (thread < end - last) *reinterpret_cast<unsigned char*>(last + thread) = 0;
  }
}
