// Epochs: how a writer knows that no reader can still read a row that left the index.
//
// The writer counts epochs. A reader announces the epoch it started in, in a slot of its own, and clears the slot when
// it leaves. A row unlinked in epoch e may be written again once every announced epoch is later than e.
//
// Why that is enough. All operations below are seq_cst, so they lie in one order S. Say the writer unlinks a row,
// ends epoch e, and then finds no reader of epoch <= e.
//   - A reader that announced an epoch > e read the counter after the writer ended e, so it sees the unlinking.
//   - A reader whose announcement the writer did not find announces itself later in S than the writer looked, hence
//     later than the unlinking; its own (seq_cst) loads of the index come later still, so they see the unlinking.
//     This holds even if the epoch it announces is an old one that it read long before.
//   - A reader that has left cleared its slot with a release store that the writer's look acquired, so what it read
//     happened before anything the writer writes now.
//
// A table that processes share (shared_area.hpp) has its counter and its slots in their memory: one block per process,
// so that the slots of a killed process are known and can be cleared. There a process has 64 slots; if all are taken,
// a reader waits for a slot.
//
// A slot is claimed for one call and given back, so neither the number of threads nor their lifetime matters. Threads
// start at different slots; a thread that finds all slots taken adds another block. Blocks stay until the end, so a
// claim is a bounded walk and never waits.
#pragma once

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <thread>

namespace hotrow {

class Epochs {
 public:
  struct alignas(64) Slot {
    std::atomic<uint64_t> epoch{0};  // 0: free
  };
  struct Block {
    Slot slots[64];
    std::atomic<Block*> next{nullptr};

    void clear() {
      for (Slot& slot : slots) slot.epoch.store(0, std::memory_order_release);
    }
  };

  // The processes that share a table.
  class Peers {
   public:
    virtual ~Peers() = default;
    virtual bool is_attached() const = 0;  // whether this process is one of them
    virtual void clear_if_gone(uint32_t peer, Block& block) = 0;
    // Give up waiting for a peer that reads.
    [[noreturn]] virtual void fail_stuck(uint32_t peer) const = 0;
  };
  struct Shared {
    std::atomic<uint64_t>* now;
    Block* blocks;  // [count], by peer
    uint32_t count;
    uint32_t mine;
    Peers* peers;
  };
  struct NotAttached : std::runtime_error {
    NotAttached() : std::runtime_error("the table is shared, and this process, a forked child, is not attached to it") {}
  };

  Epochs() : now_(&own_now_), blocks_(&first_), block_count_(1), mine_(&first_) {}
  explicit Epochs(const Shared& shared)
      : now_(shared.now),
        blocks_(shared.blocks),
        block_count_(shared.count),
        mine_(shared.blocks + shared.mine),
        peers_(shared.peers) {}
  Epochs(const Epochs&) = delete;
  Epochs& operator=(const Epochs&) = delete;
  ~Epochs() {
    for (Block* block = first_.next.load(); block;) {
      Block* next = block->next.load();
      delete block;
      block = next;
    }
  }

  // A reader's stay. A row that is found during the stay does not change until the stay ends.
  class Reader {
   public:
    explicit Reader(Epochs& epochs) : slot_(epochs.claim()) {}
    Reader(const Reader&) = delete;
    Reader& operator=(const Reader&) = delete;
    // release: what was read under this stay comes before the writer finds the slot free.
    ~Reader() { slot_.epoch.store(0, std::memory_order_release); }

   private:
    Slot& slot_;
  };

  // Throws NotAttached: before a read or a write by a forked child.
  void check_attached() const {
    if (peers_ && !peers_->is_attached()) throw NotAttached{};
  }

  // Writer: end the running epoch and return it. Rows unlinked before the call belong to it or to an earlier epoch.
  uint64_t end_epoch() { return now_->fetch_add(1, std::memory_order_seq_cst); }

  // Writer: the earliest epoch a reader may be in; UINT64_MAX if there is no reader.
  uint64_t earliest_reader() const { return earliest().epoch; }

  // Writer: free the slots of processes that ended while they were reading.
  void clear_gone() {
    for (uint32_t peer = 0; peers_ && peer < block_count_; ++peer) peers_->clear_if_gone(peer, blocks_[peer]);
  }

  // Writer: it has waited too long. Fails if another process, which may be stopped, has the earliest reader.
  void check_stuck() const {
    if (!peers_) return;
    const Earliest reader = earliest();
    if (reader.epoch != UINT64_MAX) peers_->fail_stuck(reader.peer);
  }

 private:
  struct Earliest {
    uint64_t epoch;
    uint32_t peer;
  };

  Earliest earliest() const {
    Earliest earliest = {UINT64_MAX, 0};
    for (uint32_t peer = 0; peer < block_count_; ++peer)
      for (const Block* block = blocks_ + peer; block; block = block->next.load(std::memory_order_seq_cst))
        for (const Slot& slot : block->slots) {
          const uint64_t epoch = slot.epoch.load(std::memory_order_seq_cst);
          if (epoch != 0 && epoch < earliest.epoch) earliest = {epoch, peer};
        }
    return earliest;
  }

  static uint32_t thread_number() {
    static std::atomic<uint32_t> threads{0};  // relaxed: only spreads threads over slots
    thread_local const uint32_t number = threads.fetch_add(1, std::memory_order_relaxed);
    return number;
  }

  Slot& claim() {
    check_attached();
    const uint64_t epoch = now_->load(std::memory_order_seq_cst);
    const uint32_t start = thread_number();
    for (Block* block = mine_;; block = following(*block))
      for (uint32_t i = 0; i < 64; ++i) {
        Slot& slot = block->slots[(start + i) % 64];
        uint64_t free = 0;
        if (slot.epoch.load(std::memory_order_relaxed) == 0 &&
            slot.epoch.compare_exchange_strong(free, epoch, std::memory_order_seq_cst))
          return slot;
      }
  }

  // The block after `block`, added if there is none. Throws std::bad_alloc.
  Block* following(Block& block) const {
    if (peers_) {
      std::this_thread::yield();
      return &block;
    }
    Block* next = block.next.load(std::memory_order_seq_cst);
    if (next) return next;
    Block* added = new Block;
    if (block.next.compare_exchange_strong(next, added, std::memory_order_seq_cst)) return added;
    delete added;
    return next;
  }

  std::atomic<uint64_t> own_now_{1};
  Block first_;
  std::atomic<uint64_t>* const now_;  // the running epoch; never 0
  Block* const blocks_;
  const uint32_t block_count_;
  Block* const mine_;
  Peers* const peers_ = nullptr;
};

}  // namespace hotrow
