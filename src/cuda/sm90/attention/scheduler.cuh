// The tile scheduler of persistent kernels whose CTAs own query tiles (forward, dQ).
//
// A work unit is one query tile or, under a causal mask, a pair of tiles of one sequence, the n-th
// from the end and the n-th from the start. Units of equally long sequences then have equal work,
// and CTAs that run at the same time read the same keys. Dense: static schedule, CTAs take every
// gridDim.x-th unit, and then single tiles of the tail (PairSchedule). Varlen, where units differ
// in work: dynamic schedule, CTAs take units from a counter in device memory, each as late as
// possible. One warp of the producer warpgroup, the scheduler warp, publishes work tiles to the CTA
// through shared memory.
#pragma once
#include <algorithm>
#include <cstdint>

#include "attention/problem.h"
#include "core/ceil_div.h"
#include "core/divisor.h"
#include "ptx/mbarrier.cuh"
#include "ptx/special_registers.cuh"
#include "ptx/vectors.cuh"
#include "ptx/warp_uniform.cuh"
#include "sm90/attention/pair_schedule.cuh"
#include "sm90/attention/smem.cuh"
#include "sm90/pipeline.cuh"

namespace flashvar::sm90::attention {

using namespace flashvar::attention;  // what all architectures share

struct QueryScheduler {
  uint32_t ctas;            // of the grid
  uint32_t work_units;      // over all heads and batches; with a tail, those before it
  uint32_t units_per_head;  // dense: of one head and sequence; varlen: of one head, all sequences
  bool paired;              // a unit is a pair of tiles
  uint32_t heads;           // split heads (KeySplits)
  Divisor units_per_head_divisor, heads_divisor, group_divisor, splits_divisor;
  PairTail tail;  // dense, where units are pairs
  // Dynamic schedule: units taken beyond the first gridDim.x, 0 at the start. Null: static
  // schedule.
  uint32_t* counter;

  // Returns false where unit numbers do not fit 31 bits. `counter_` may be null; it is used only
  // for varlen queries with more units than CTAs. Host only.
  bool init(const Problem& problem, int block_q, int multiprocessors, int blocks_per_sm,
            uint32_t* counter_) {
    int const resident_ctas = multiprocessors * blocks_per_sm;
    bool const varlen = problem.queries.offsets != nullptr;
    heads = static_cast<uint32_t>(problem.heads_q * problem.splits.count);
    // A row of units: one head of one sequence; varlen: one head of all sequences.
    int64_t const rows = varlen ? heads : int64_t{heads} * problem.batch;
    int64_t const tiles = problem.queries.tiles(varlen ? problem.batch : 1, block_q);
    paired = problem.window_right != kUnbounded && rows * tiles > resident_ctas;
    int64_t const units = !paired  ? tiles
                          : varlen ? problem.queries.tiles(problem.batch, 2 * block_q)
                                   : (tiles + 1) / 2;
    if (rows * units > INT32_MAX) return false;
    units_per_head = static_cast<uint32_t>(units);
    work_units = static_cast<uint32_t>(rows * units);
    auto const most = static_cast<uint32_t>(resident_ctas);
    ctas = paired && !varlen && blocks_per_sm == 1
               ? PairSchedule::balanced_ctas(work_units, static_cast<uint32_t>(rows),
                                             static_cast<uint32_t>(tiles), most)
               : std::min(work_units, most);
    tail = {};
    // A tail only where the last round would leave more than a fifteenth of all rounds idle,
    // because neighboring tiles of the tail share no keys.
    uint32_t const rounds = ceil_div(work_units, std::max(ctas, 1u));
    if (paired && !varlen && int64_t{15} * work_units < int64_t{14} * rounds * ctas) {
      PairSchedule const pairs = PairSchedule::make(work_units, static_cast<uint32_t>(rows),
                                                    static_cast<uint32_t>(tiles), ctas);
      work_units = std::min(work_units, pairs.rounds * ctas);
      tail = pairs.tail;
    }
    units_per_head_divisor = Divisor::make(units_per_head);
    heads_divisor = Divisor::make(heads);
    group_divisor = Divisor::make(problem.group);
    splits_divisor = Divisor::make(problem.splits.count);
    counter = varlen && work_units > static_cast<uint32_t>(resident_ctas) ? counter_ : nullptr;
    return true;
  }
};

// WorkTile: coordinates of a query tile, as the scheduler warp publishes them. One slot in shared
// memory, guarded by full_work_tile and empty_work_tile.
struct WorkTile {
  uint32_t batch, head;  // a split head (KeySplits)
  int32_t first_query;   // within the sequence; negative: no more tiles

  __device__ __forceinline__ bool exists() const { return first_query >= 0; }

  // For the scheduler warp: publishes the CTA's tile `number`.
  template <class Config>
  __device__ __forceinline__ void publish(const QueryTileSmem<Config>& smem,
                                          uint32_t number) const {
    // All readers have released the previous tile.
    ptx::mbarrier_wait(smem.empty_work_tile(), PipelineState<1>{number}.phase() ^ 1);
    if (ptx::thread_index() % 32 == 0) {
      ptx::shared_store(smem.work_tile(),
                        uint4{batch, head, static_cast<uint32_t>(first_query), 0});
      ptx::mbarrier_arrive(smem.full_work_tile());
    }
  }

  // For the load warp and consumers, all lanes: receives tile `number`.
  template <class Config>
  __device__ __forceinline__ static WorkTile receive(const QueryTileSmem<Config>& smem,
                                                     uint32_t number) {
    // The tile is published.
    ptx::mbarrier_wait(smem.full_work_tile(), PipelineState<1>{number}.phase());
    uint4 const words = ptx::shared_load_words(smem.work_tile());
    return {ptx::warp_uniform(words.x), ptx::warp_uniform(words.y),
            static_cast<int32_t>(ptx::warp_uniform(words.z))};
  }
  // Releases the received tile; the scheduler warp may then overwrite it with the next.
  template <class Config>
  __device__ __forceinline__ static void release(const QueryTileSmem<Config>& smem) {
    ptx::mbarrier_arrive(smem.empty_work_tile());
  }
};

// The scheduler warp: publishes the tiles of the CTA's units and of the tail, then a tile that does
// not exist.
template <class Config, class Args>
__device__ __forceinline__ void schedule_query_tiles(const Args& args,
                                                     const QueryTileSmem<Config>& smem) {
  const Problem& problem = args.problem;
  uint32_t published = 0;
  for (uint32_t unit = blockIdx.x; unit < args.work_units;) {
    uint32_t const row = unit / args.units_per_head_divisor;
    uint32_t const number = unit - row * args.units_per_head;
    WorkTile work_tile;
    int32_t tile, count;  // number of tile or pair within the sequence; rows of the sequence
    if (problem.queries.offsets == nullptr) {
      work_tile.batch = row / args.heads_divisor;
      work_tile.head = row - work_tile.batch * args.heads;
      tile = number;
      count = problem.queries.seqlen;
    } else {
      // Two calls of find(), so that each divides by a constant.
      uint32_t const wanted = args.units_per_head - 1 - number;
      uint32_t const batches = static_cast<uint32_t>(problem.batch);
      TileCoordinate coordinate;
      if (args.paired) {
        coordinate = problem.queries.find(wanted, batches, 2 * Config::kBlockQ);
        tile = coordinate.first / (2 * Config::kBlockQ);
      } else {
        coordinate = problem.queries.find(wanted, batches, Config::kBlockQ);
        tile = coordinate.first / Config::kBlockQ;
      }
      work_tile.batch = coordinate.batch;
      work_tile.head =
          unit / args.units_per_head_divisor;  // recomputed: the warp has few registers
      count = problem.queries.span(coordinate.batch).count;
    }
    // The last queries come first: under a causal mask they have the most work. The tile may not
    // exist: varlen has more units than tiles need, and the middle one of an odd number of tiles
    // has no partner.
    int32_t const last = ceil_div(count, Config::kBlockQ) - 1 - tile;
    if (args.paired ? tile <= last : last >= 0) {
      work_tile.first_query = last * Config::kBlockQ;
      work_tile.publish(smem, published++);
    }
    if (args.paired && tile < last) {
      work_tile.first_query = tile * Config::kBlockQ;
      work_tile.publish(smem, published++);
    }
    if (args.counter != nullptr) {
      unit = 0;
      if (ptx::thread_index() % 32 == 0) unit = atomicAdd(args.counter, 1);
      unit = __shfl_sync(0xffffffffu, unit, 0);
    }
    unit += gridDim.x;
  }
  uint32_t const tiles = ceil_div(problem.queries.seqlen, Config::kBlockQ);
  for (uint32_t round = 0; PairSchedule::tail_tile(round) < args.tail.count; ++round) {
    PairTail::Part const part = args.tail.find(PairSchedule::tail_tile(round), tiles);
    uint32_t const position = part.number / part.width;  // in the part
    uint32_t const row = part.row + part.number - position * part.width;
    uint32_t const batch = row / args.heads_divisor;
    WorkTile const work_tile{
        batch, row - batch * args.heads,
        static_cast<int32_t>((tiles - 1 - part.block - position) * Config::kBlockQ)};
    work_tile.publish(smem, published++);
  }
  WorkTile{0, 0, -1}.publish(smem, published);
}

}  // namespace flashvar::sm90::attention
