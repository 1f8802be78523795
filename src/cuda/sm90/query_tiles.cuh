// Which tiles of queries a block takes, and what is known of one.
//
// Under a causal mask an item is two tiles of one sequence, the n-th from the end and the n-th from
// the start: so items of sequences that are equally long are too, and blocks that run at the same
// time read the same keys. Blocks are dealt items out; of packed sequences, whose lengths differ,
// they ask a counter for the next one, as late as they can. A warp of the producer finds tiles, and
// hands their places on through shared memory.
#pragma once
#include <cstdint>

#include "core/mask.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/special_registers.cuh"
#include "ptx/vectors.cuh"
#include "sm90/pipeline.cuh"

namespace flashvar::sm90 {

// A tile's place: which head of which sequence, and the first query within that.
struct Place {
  uint32_t batch, head;
  int32_t first_query;  // negative: there is no more

  __device__ __forceinline__ bool exists() const { return first_query >= 0; }

  // One warp, that which finds: hands the place numbered `number` on to those who work there.
  template <class Config>
  __device__ __forceinline__ void pass_on(const Smem<Config>& smem, uint32_t number) const {
    ptx::mbarrier_wait(smem.empty_place(), PipelineState<1>{number}.phase() ^ 1);
    if (ptx::thread_index() % 32 == 0) {
      ptx::shared_store(smem.place(), uint4{batch, head, static_cast<uint32_t>(first_query), 0});
      ptx::mbarrier_arrive(smem.full_place());
    }
  }

  // All lanes of a warp that works there, and which then wants the next.
  template <class Config>
  __device__ __forceinline__ static Place receive(const Smem<Config>& smem, uint32_t number) {
    ptx::mbarrier_wait(smem.full_place(), PipelineState<1>{number}.phase());
    uint4 const words = ptx::shared_load_words(smem.place());
    // The same for all lanes, and shown to be: what follows from it stays in uniform registers.
    auto const uniform = [](uint32_t word) { return __shfl_sync(0xffffffffu, word, 0); };
    return {uniform(words.x), uniform(words.y), static_cast<int32_t>(uniform(words.z))};
  }
  template <class Config>
  __device__ __forceinline__ static void want_next(const Smem<Config>& smem) {
    ptx::mbarrier_arrive(smem.empty_place());
  }
};

// One warp: finds the block's tiles, and says when there are no more.
template <class Config, class Arguments>
__device__ __forceinline__ void find_query_tiles(const Arguments& arguments,
                                                 const Smem<Config>& smem) {
  const AttentionProblem& problem = arguments.problem;
  uint32_t passed = 0;
  for (uint32_t item = blockIdx.x; item < arguments.items;) {
    uint32_t const row = arguments.by_row_items(item);
    uint32_t const number = item - row * arguments.row_items;
    Place place;
    int32_t tile, count;  // within the sequence, or a pair of tiles; rows of the sequence
    if (problem.queries.offsets == nullptr) {
      place.batch = arguments.by_heads_q(row);
      place.head = row - place.batch * problem.heads_q;
      tile = number;
      count = problem.queries.seqlen;
    } else {
      // Twice, so that rows are constants to divide by.
      uint32_t const wanted = arguments.row_items - 1 - number;
      uint32_t const batches = static_cast<uint32_t>(problem.batch);
      TilePosition position;
      if (arguments.paired) {
        position = problem.queries.find(wanted, batches, 2 * Config::kBlockQ);
        tile = position.first / (2 * Config::kBlockQ);
      } else {
        position = problem.queries.find(wanted, batches, Config::kBlockQ);
        tile = position.first / Config::kBlockQ;
      }
      place.batch = position.batch;
      place.head = arguments.by_row_items(item);  // anew: registers are few here
      count = problem.queries.span(position.batch).count;
    }
    // The last queries first: under a causal mask they have the most to do. There are more items of
    // packed sequences than tiles, and the middle of an odd number of tiles is no pair.
    int32_t const last = (count + Config::kBlockQ - 1) / Config::kBlockQ - 1 - tile;
    if (arguments.paired ? tile <= last : last >= 0) {
      place.first_query = last * Config::kBlockQ;
      place.pass_on(smem, passed++);
    }
    if (arguments.paired && tile < last) {
      place.first_query = tile * Config::kBlockQ;
      place.pass_on(smem, passed++);
    }
    if (arguments.next_item != nullptr) {
      item = 0;
      if (ptx::thread_index() % 32 == 0) item = atomicAdd(arguments.next_item, 1);
      item = __shfl_sync(0xffffffffu, item, 0);
    }
    item += gridDim.x;
  }
  Place{0, 0, -1}.pass_on(smem, passed);
}

// One tile of queries of one head, and the blocks of keys that they see.
template <class Config>
struct Tile {
  Mask mask;
  uint32_t batch, head, head_kv;
  int32_t first_query;   // within the sequence
  int32_t row_q, row_k;  // of the tensor, where the sequence begins
  int32_t begin, end;    // blocks of keys

  template <class Arguments>
  __device__ __forceinline__ Tile(const Arguments& arguments, const Place& place)
      : batch(place.batch), head(place.head), first_query(place.first_query) {
    const AttentionProblem& problem = arguments.problem;
    head_kv = arguments.by_group(head);
    Span const queries = problem.queries.span(batch), keys = problem.keys.span(batch);
    row_q = queries.first;
    row_k = keys.first;
    int32_t count_k = keys.count;
    if (problem.seqused_k != nullptr) count_k = min(max(problem.seqused_k[batch], 0), count_k);
    mask = {queries.count, count_k, problem.window_left, problem.window_right};
    int32_t const last = min(first_query + Config::kBlockQ, mask.seqlen_q) - 1;
    begin = mask.visible_begin(first_query) / Config::kBlockKV;
    end = (mask.visible_end(last) + Config::kBlockKV - 1) / Config::kBlockKV;
  }

  // Where the blocks end that a warpgroup's rows see: no earlier than after the first, and there
  // where it has no rows.
  __device__ __forceinline__ int32_t end_of(uint32_t warpgroup) const {
    int32_t const first = first_query + static_cast<int32_t>(warpgroup) * 64;
    uint32_t const keys = mask.visible_end(first + 63);  // dividing it takes fewer registers
    int32_t const own = (keys + Config::kBlockKV - 1) / Config::kBlockKV;
    return max(first < mask.seqlen_q ? min(own, end) : begin, begin + 1);
  }

  // Whether its rows see any key.
  __device__ __forceinline__ bool sees() const { return begin < end; }
};

}  // namespace flashvar::sm90
