// Where the sequences of a batch lie in a tensor, and how tiles of rows are dealt out over them.
//
// Dense sequences have one length and an own place along the batch dimension. Packed ones follow
// each other along the rows; where they begin is known to the device alone. Then the grid is made
// for any lengths: sequence b is given tiles from offsets[b] / rows + b on, which are at least as
// many as it needs, so no more than total / rows + batch tiles are launched whatever the longest
// is.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

namespace flashvar {

// Rows of one sequence.
struct Span {
  int32_t first;  // row of the tensor; 0 for dense sequences, which the batch stride leads to
  int32_t count;
};

// One tile of rows: which sequence, and where in it. `first` may be past the sequence's end.
struct TilePosition {
  uint32_t batch;
  int32_t first;
};

struct Sequences {
  const int32_t* offsets;  // [batch + 1], in device memory; null: dense
  int32_t seqlen;          // of every dense sequence; an upper bound of packed ones
  int32_t total;           // rows of all packed sequences

  // How many tiles of `rows` rows to launch.
  __host__ __device__ int64_t tiles(int64_t batch, int32_t rows) const {
    if (offsets != nullptr) return total / rows + batch;
    return batch * ((seqlen + int64_t{rows} - 1) / rows);
  }

#ifdef __CUDACC__
  // Offsets that make no sense lead to empty sequences, never outside of the tensor.
  __device__ __forceinline__ Span span(uint32_t batch) const {
    if (offsets == nullptr) return {0, seqlen};
    int32_t const begin = min(max(offsets[batch], 0), total);
    return {begin, min(max(offsets[batch + 1], begin), total) - begin};
  }

  // Number of a sequence's first tile.
  __device__ __forceinline__ int64_t first_tile(uint32_t batch, int32_t rows) const {
    if (offsets == nullptr) return batch * ((seqlen + int64_t{rows} - 1) / rows);
    return static_cast<uint32_t>(min(max(offsets[batch], 0), total)) / static_cast<uint32_t>(rows) +
           batch;
  }

  // The tile numbered `tile`; within a sequence they ascend. All lanes of a warp ask together: each
  // looks at another sequence, so that 32 of them cost one access to memory and 1,024 two.
  __device__ __forceinline__ TilePosition find(uint32_t tile, uint32_t batches,
                                               int32_t rows) const {
    if (offsets == nullptr) {
      uint32_t const per_sequence = (seqlen + rows - 1) / rows;
      return {tile / per_sequence, static_cast<int32_t>(tile % per_sequence) * rows};
    }
    // Launchers see to it that numbers of tiles have 31 bits.
    auto const first = [&](uint32_t b) { return static_cast<uint32_t>(first_tile(b, rows)); };
    uint32_t const wanted = tile + first(0);
    uint32_t const lane = threadIdx.x % 32;
    uint32_t batch = 0;  // the last whose first tile is not past the wanted one
    for (uint32_t candidates = batches; candidates > 1;) {
      uint32_t const step = (candidates + 31) / 32;
      bool const fits = lane * step < candidates && first(batch + lane * step) <= wanted;
      uint32_t const last = 31 - __clz(__ballot_sync(0xffffffffu, fits));  // lane 0's always fits
      batch += last * step;
      candidates = min(step, candidates - last * step);
    }
    int64_t const row = int64_t{wanted - first(batch)} * rows;
    return {batch, static_cast<int32_t>(min(row, int64_t{total}))};
  }

#endif
};

}  // namespace flashvar
