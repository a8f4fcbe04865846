// The memory of a host table that processes share: a file of /dev/shm, mapped by all of them.
//
//   header   4,096 bytes             SharedHeader
//   epochs   kPeers * sizeof(Block)  for each process, where its readers announce themselves (epochs.hpp)
//   index    64 B                    buckets of bucket.hpp
//   rows     (C + spare + 1) S       rows of row_type.hpp
//
// Each section begins on a huge-page border. Callers make sure that one process writes; the others read.
//
// Peers. A process holds a lock on byte i of the file for as long as it is attached, and then block i of the epochs is
// its own. The system releases the lock when the process ends, however it ends. So a block whose lock is free has no
// readers, whatever it contains. (The locks belong to the open file, F_OFD_SETLK, because process numbers mean nothing
// between containers and are reused.)
//
// Killed writers. Every step of a write leaves a table that readers can still read (bucket.hpp: a visible key has a
// visible row); what a write had not finished, HostTable::adopt clears up for the next writer.
//
// A forked child is not attached. It reads and writes nothing, and closes its copies of the file and of the mapping,
// which would keep the lock of an ended process.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "rows/row_type.hpp"
#include "table/epochs.hpp"

namespace hotrow {

// Shared memory cannot be created, or has the wrong content.
struct SharedFault {
  std::string file;
  std::string reason;
};

// What a table is like.
struct SharedShape {
  uint32_t dim;
  RowType row_type;
  uint64_t capacity_rows;
};

struct SharedHeader {
  static constexpr size_t kSourceBytes = 256;
  static constexpr uint32_t kPeers = 64;
  char magic[8];
  uint32_t format;
  uint32_t dim;
  uint32_t row_type;
  uint32_t unused;
  uint64_t capacity_rows;
  uint64_t file_bytes;
  uint64_t seed;  // of the index's hash
  char source[kSourceBytes];         // what the rows came from, ended by 0; written before others know of the file
  std::atomic<uint32_t> is_changed;  // whether other rows came since
  std::atomic<int64_t> rows;
  alignas(64) std::atomic<uint64_t> epoch;
  alignas(64) std::atomic<int32_t> process_ids[kPeers];  // for messages; 0: unknown
};

class SharedArea final : public Epochs::Peers {
 public:
  static constexpr uint32_t kPeers = SharedHeader::kPeers;

  // Create a new file and allocate all of its memory. Throws SharedFault.
  SharedArea(const std::string& path, const SharedShape& shape);
  // Attach to a file. Throws SharedFault.
  explicit SharedArea(const std::string& path);
  SharedArea(const SharedArea&) = delete;
  SharedArea& operator=(const SharedArea&) = delete;
  ~SharedArea();

  SharedShape shape() const;
  bool is_new() const { return is_new_; }
  // A new file is complete: from now on others can attach.
  void publish();
  // Identifies the file, because another file may replace it; 0 in a forked child.
  uint64_t inode() const;
  SharedHeader& header() const { return *reinterpret_cast<SharedHeader*>(data_); }
  std::byte* index() const { return data_ + index_; }
  std::byte* rows() const { return data_ + rows_; }
  Epochs::Shared epochs();

  bool is_attached() const override { return descriptor_ >= 0; }
  void clear_if_gone(uint32_t peer, Epochs::Block& block) override;
  [[noreturn]] void fail_stuck(uint32_t peer) const override;

  [[noreturn]] void fail(const std::string& reason) const;

 private:
  static void before_fork();
  static void after_fork_in_parent();
  static void after_fork_in_child();

  size_t lay_out(const SharedShape& shape);
  void make(const SharedShape& shape);
  void open_existing();
  void reserve();
  void map(int flags);
  void allocate();
  void check_header() const;
  void take_peer();
  void enlist();
  void let_go();
  bool lock(uint32_t peer, short type) const;
  [[noreturn]] void fail_with_errno(const std::string& what) const;

  const std::string path_;
  const bool is_new_;
  int descriptor_ = -1;
  uint32_t peer_ = 0;
  size_t index_ = 0, rows_ = 0;
  size_t bytes_ = 0;  // mapped
  std::byte* data_ = nullptr;
};

}  // namespace hotrow
