#include "memory/shared_area.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <new>
#include <set>

#include "memory/pages.hpp"
#include "table/bucket_index.hpp"
#include "table/host_table.hpp"
#include "table/key_hash.hpp"

namespace hotrow {
namespace {

constexpr char kMagic[8] = {'H', 'R', 'S', 'H', 'A', 'R', 'E', 'D'};
constexpr uint32_t kFormat = 2;
size_t whole_pages(size_t bytes) { return (bytes + kHugePage - 1) / kHugePage * kHugePage; }

static_assert(sizeof(SharedHeader) <= 4096, "the header has a page");
static_assert(std::atomic<uint64_t>::is_always_lock_free, "locks inside the library are not shared");

// The areas of this process.
struct Attached {
  std::mutex guard;
  std::set<SharedArea*> areas;
};

// Never destroyed: daemon threads may fork until the very end.
Attached& attached() {
  static Attached* const one = new Attached;
  return *one;
}

}  // namespace

SharedArea::SharedArea(const std::string& path, const SharedShape& shape) : path_(path), is_new_(true) {
  descriptor_ = open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (descriptor_ < 0) fail_with_errno("cannot be made");
  try {
    make(shape);
  } catch (...) {
    let_go();
    unlink(path.c_str());
    throw;
  }
}

SharedArea::SharedArea(const std::string& path) : path_(path), is_new_(false) {
  descriptor_ = open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW);
  if (descriptor_ < 0) fail_with_errno("cannot be opened");
  try {
    open_existing();
  } catch (...) {
    let_go();
    throw;
  }
}

void SharedArea::make(const SharedShape& shape) {
  bytes_ = lay_out(shape);
  reserve();
  map(MAP_SHARED);
  allocate();
  auto* made = new (data_) SharedHeader{};
  made->format = kFormat;
  made->dim = shape.dim;
  made->row_type = static_cast<uint32_t>(shape.row_type);
  made->capacity_rows = shape.capacity_rows;
  made->file_bytes = bytes_;
  made->seed = random_seed();
  made->epoch.store(1);
  take_peer();
}

// The magic comes last: without it the file is refused.
void SharedArea::publish() {
  std::atomic_thread_fence(std::memory_order_release);
  std::memcpy(header().magic, kMagic, sizeof kMagic);
}

void SharedArea::open_existing() {
  struct stat found = {};
  if (fstat(descriptor_, &found) != 0) fail_with_errno("cannot be inspected");
  bytes_ = static_cast<size_t>(found.st_size);
  if (bytes_ < 4096) fail("expected a table, found a file of " + std::to_string(bytes_) + " bytes");
  map(MAP_SHARED | MAP_POPULATE);
  check_header();
  const size_t expected = lay_out(shape());
  if (bytes_ != expected || header().file_bytes != expected)
    fail("expected " + std::to_string(expected) + " bytes, found " + std::to_string(bytes_));
  take_peer();
}

void SharedArea::check_header() const {
  if (std::memcmp(header().magic, kMagic, sizeof kMagic) != 0 || header().format != kFormat)
    fail("is not a table of this version of Hotrow");
  if (header().row_type >= kRowTypes) fail("is damaged: its row type is unknown");
  if (header().dim < 1 || header().dim > HostTable::kMaxDim || header().capacity_rows < 1 ||
      header().capacity_rows > HostTable::kMaxCapacityRows)
    fail("is damaged: a table cannot have " + std::to_string(header().capacity_rows) + " rows of dim " +
         std::to_string(header().dim));
  if (header().source[SharedHeader::kSourceBytes - 1] != 0) fail("is damaged: the name of its source has no end");
}

SharedArea::~SharedArea() { let_go(); }

SharedShape SharedArea::shape() const {
  return {header().dim, static_cast<RowType>(header().row_type), header().capacity_rows};
}

uint64_t SharedArea::inode() const {
  struct stat found = {};
  return fstat(descriptor_, &found) == 0 ? found.st_ino : 0;
}

// Where the sections lie; returns the bytes of the file.
size_t SharedArea::lay_out(const SharedShape& shape) {
  const uint64_t rows = shape.capacity_rows + HostTable::spare_rows_for(shape.capacity_rows);
  index_ = whole_pages(4096 + kPeers * sizeof(Epochs::Block));
  rows_ = index_ + whole_pages(BucketIndex::bytes_for(shape.capacity_rows));
  return rows_ + whole_pages(RowArena::bytes_for(row_stride_bytes(shape.row_type, shape.dim), rows));
}

void SharedArea::reserve() {
  struct statvfs space = {};
  const bool is_bounded = fstatvfs(descriptor_, &space) == 0 && space.f_blocks != 0;
  const uint64_t free = static_cast<uint64_t>(space.f_bavail) * space.f_frsize;
  if (is_bounded && bytes_ > free)
    fail("cannot allocate " + std::to_string(bytes_) + " bytes: " + std::to_string(free) + " are free");
  if (ftruncate(descriptor_, static_cast<off_t>(bytes_)) != 0)
    fail_with_errno("cannot allocate " + std::to_string(bytes_) + " bytes");
}

// All of the memory now: a page that the system does not have when it is first touched ends the process.
//
// The mapping goes first, because only its pages are huge where huge pages are a matter of advice. Linux before 5.14
// refuses that. fallocate takes what is left or reports what is wrong; in parts, as a signal ends a part and undoes it.
void SharedArea::allocate() {
  constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, which older headers do not have
  for_parts(data_, bytes_, [](std::byte* part, size_t bytes) { madvise(part, bytes, kPopulateWrite); });
  constexpr size_t kPart = size_t{4} << 20;
  for (size_t at = 0; at < bytes_;) {
    const size_t part = std::min(kPart, bytes_ - at);
    errno = posix_fallocate(descriptor_, static_cast<off_t>(at), static_cast<off_t>(part));
    if (errno == EINTR) continue;
    if (errno != 0) fail_with_errno("cannot allocate " + std::to_string(bytes_) + " bytes");
    at += part;
  }
}

void SharedArea::map(int flags) {
  void* mapped = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, flags, descriptor_, 0);
  if (mapped == MAP_FAILED) fail_with_errno("cannot be mapped");
  data_ = static_cast<std::byte*>(mapped);
  prepare_pages(data_, bytes_);
}

Epochs::Shared SharedArea::epochs() {
  return {&header().epoch, reinterpret_cast<Epochs::Block*>(data_ + 4096), kPeers, peer_, this};
}

bool SharedArea::lock(uint32_t peer, short type) const {
  struct flock byte = {};
  byte.l_type = type;
  byte.l_whence = SEEK_SET;
  byte.l_start = peer;
  byte.l_len = 1;
  return fcntl(descriptor_, F_OFD_SETLK, &byte) == 0;
}

// A lock may be held for a moment by clear_if_gone of the writer: then another byte is taken.
void SharedArea::take_peer() {
  for (peer_ = 0; peer_ < kPeers; ++peer_)
    if (lock(peer_, F_WRLCK)) {
      epochs().blocks[peer_].clear();  // of a process that was killed
      header().process_ids[peer_].store(getpid());
      return enlist();
    }
  fail("is already shared by " + std::to_string(kPeers) + " processes, the maximum");
}

void SharedArea::enlist() {
  static const int watched = pthread_atfork(&before_fork, &after_fork_in_parent, &after_fork_in_child);
  if (watched != 0) throw std::bad_alloc();
  const std::lock_guard<std::mutex> turn(attached().guard);
  attached().areas.insert(this);
}

void SharedArea::clear_if_gone(uint32_t peer, Epochs::Block& block) {
  if (peer == peer_ || !lock(peer, F_WRLCK)) return;
  block.clear();
  lock(peer, F_UNLCK);
}

void SharedArea::fail_stuck(uint32_t peer) const {
  fail("process " + std::to_string(header().process_ids[peer].load()) +
       " has been in the middle of a read for seconds, so a row could not be written: if it is stopped, let it go on "
       "or end it");
}

void SharedArea::let_go() {
  if (data_) munmap(data_, bytes_);
  const std::lock_guard<std::mutex> turn(attached().guard);
  attached().areas.erase(this);
  if (descriptor_ >= 0) close(descriptor_);
}

void SharedArea::before_fork() { attached().guard.lock(); }

void SharedArea::after_fork_in_parent() { attached().guard.unlock(); }

void SharedArea::after_fork_in_child() {
  for (SharedArea* area : attached().areas) {
    // A mapping, too, keeps the file open, and with it the lock; zeros take its place.
    mmap(area->data_, area->bytes_, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    close(area->descriptor_);
    area->descriptor_ = -1;
  }
  attached().areas.clear();
  attached().guard.unlock();
}

void SharedArea::fail(const std::string& reason) const { throw SharedFault{path_, reason}; }

void SharedArea::fail_with_errno(const std::string& what) const { fail(what + ": " + std::strerror(errno)); }

}  // namespace hotrow
