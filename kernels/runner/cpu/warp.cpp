// Warp collectives: each lane waits for the lanes of its mask, and the last lane to arrive computes all results.
#include <cstdio>

#include "block.hpp"
#include "sanitizer.hpp"

namespace cpu {

const char* collective_name(Collective kind) {
  static const char* const names[] = {"__syncwarp",       "__ballot_sync",     "__any_sync",
                                      "__all_sync",       "__shfl_sync",       "__match_any_sync",
                                      "__reduce_add_sync", "__reduce_min_sync", "__reduce_max_sync"};
  return names[static_cast<int>(kind)];
}

namespace {

// The result of a collective that gives every lane the same: all collectives except shuffles and matches.
uint64_t common_result(Collective kind, const Warp& warp, unsigned mask) {
  unsigned ballot = 0, sum = 0, least = ~0u, most = 0;
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (!(mask >> lane & 1)) continue;
    const unsigned value = static_cast<unsigned>(warp.value[lane]);
    if (value) ballot |= 1u << lane;
    sum += value;
    least = value < least ? value : least;
    most = value > most ? value : most;
  }
  switch (kind) {
    case Collective::ballot: return ballot;
    case Collective::any: return ballot != 0;
    case Collective::all: return ballot == mask;
    case Collective::add: return sum;
    case Collective::minimum: return least;
    case Collective::maximum: return most;
    default: return 0;
  }
}

unsigned equal_lanes(const Warp& warp, unsigned mask, uint64_t value) {
  unsigned lanes = 0;
  for (unsigned lane = 0; lane < 32; ++lane)
    if ((mask >> lane & 1) && warp.value[lane] == value) lanes |= 1u << lane;
  return lanes;
}

}  // namespace

void Warp::complete(unsigned lanes) {
  const Collective what = kind[__builtin_ctz(lanes)];
  const uint64_t common = common_result(what, *this, lanes);
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (!(lanes >> lane & 1)) continue;
    result[lane] = what == Collective::shuffle     ? value[source[lane]]
                   : what == Collective::match_any ? equal_lanes(*this, lanes, value[lane])
                                                   : common;
  }
  arrived &= ~lanes;
}

void Block::check_partners(unsigned mask, Collective kind) {
  const Warp& warp = *running_->warp;
  const unsigned mine = running_->thread.lane;
  char what[256];
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (!(mask >> lane & 1)) continue;
    if (warp.kind[lane] != kind || warp.mask[lane] != mask) {
      snprintf(what, sizeof what, "%s of lane %u, mask %08x, line %d, met %s of lane %u, mask %08x", collective_name(kind),
               mine, mask, running_->line, collective_name(warp.kind[lane]), lane, warp.mask[lane]);
      fail(what);
    }
    const int source = warp.source[lane];
    if (kind == Collective::shuffle && (source < 0 || source > 31 || !(mask >> source & 1))) {
      snprintf(what, sizeof what, "__shfl_sync, line %d: lane %u reads lane %d, which is not in the mask %08x",
               running_->line, lane, source, mask);
      fail(what);
    }
  }
}

uint64_t Block::collective(Collective kind, unsigned mask, uint64_t value, int source, const char* file, int line) {
  Fiber& fiber = *running_;
  Warp& warp = *fiber.warp;
  const unsigned lane = fiber.thread.lane;
  fiber.file = file;
  fiber.line = line;
  if (!(mask >> lane & 1)) {
    char what[160];
    snprintf(what, sizeof what, "%s, line %d: lane %u is not in its own mask %08x", collective_name(kind), line, lane, mask);
    fail(what);
  }
  warp.mask[lane] = mask;
  warp.kind[lane] = kind;
  warp.value[lane] = value;
  warp.source[lane] = source;
  warp.arrived |= 1u << lane;
  char* order = kind == Collective::sync ? &warp.order[__builtin_ctz(mask)] : nullptr;
  if (order) sanitizer::release(order);
  fiber.state = State::in_warp;
  if ((warp.arrived & mask) == mask) {
    check_partners(mask, kind);
    warp.complete(mask);
    Fiber* first = &fiber - lane;
    for (unsigned other = 0; other < 32; ++other)
      if ((mask >> other & 1) && other != lane) wake(first[other]);
    fiber.state = State::ready;
    if (schedule_.interrupts()) give_turn();
  } else {
    to_scheduler();
  }
  if (order) sanitizer::acquire(order);
  return warp.result[lane];
}

}  // namespace cpu
