#include "shared_area.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <new>

#include "bucket_index.hpp"
#include "host_table.hpp"

namespace hotrow {
namespace {

constexpr char kMagic[8] = {'H', 'R', 'S', 'H', 'A', 'R', 'E', 'D'};
constexpr uint32_t kFormat = 1;
constexpr size_t kHugePage = size_t{2} << 20;

size_t whole_pages(size_t bytes) { return (bytes + kHugePage - 1) / kHugePage * kHugePage; }

static_assert(sizeof(SharedHeader) <= 4096, "the header has a page");
static_assert(std::atomic<uint64_t>::is_always_lock_free, "locks inside the library are not shared");

}  // namespace

SharedArea::SharedArea(const std::string& path, const SharedShape& shape)
    : path_(path), process_(getpid()), is_new_(true) {
  descriptor_ = open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (descriptor_ < 0) fail_with_errno("cannot be made");
  try {
    bytes_ = lay_out(shape);
    // All of it now: a page that is not there when it is first touched ends the process.
    if ((errno = posix_fallocate(descriptor_, 0, static_cast<off_t>(bytes_))) != 0)
      fail_with_errno("its " + std::to_string(bytes_) + " bytes cannot be had");
    map();
    auto* made = new (data_) SharedHeader{};
    std::memcpy(made->magic, kMagic, sizeof kMagic);
    made->format = kFormat;
    made->dim = shape.dim;
    made->row_type = static_cast<uint32_t>(shape.row_type);
    made->capacity_rows = shape.capacity_rows;
    made->file_bytes = bytes_;
    made->epoch.store(1);
    take_peer();
  } catch (...) {
    let_go();
    unlink(path.c_str());
    throw;
  }
}

SharedArea::SharedArea(const std::string& path) : path_(path), process_(getpid()), is_new_(false) {
  descriptor_ = open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW);
  if (descriptor_ < 0) fail_with_errno("cannot be opened");
  try {
    struct stat found = {};
    if (fstat(descriptor_, &found) != 0) fail_with_errno("cannot be looked at");
    bytes_ = static_cast<size_t>(found.st_size);
    if (bytes_ < 4096) fail("expected a table, found a file of " + std::to_string(bytes_) + " bytes");
    map();
    if (std::memcmp(header().magic, kMagic, sizeof kMagic) != 0 || header().format != kFormat)
      fail("is no table of this version of Hotrow");
    if (header().row_type >= kRowTypes) fail("is damaged: its row type is none");
    const size_t expected = lay_out(shape());
    if (bytes_ != expected || header().file_bytes != expected)
      fail("expected " + std::to_string(expected) + " bytes, found " + std::to_string(bytes_));
    take_peer();
  } catch (...) {
    let_go();
    throw;
  }
}

SharedArea::~SharedArea() { let_go(); }

SharedShape SharedArea::shape() const {
  return {header().dim, static_cast<RowType>(header().row_type), header().capacity_rows};
}

// Where the sections lie; returns the bytes of the file.
size_t SharedArea::lay_out(const SharedShape& shape) {
  const uint64_t rows = shape.capacity_rows + HostTable::spare_rows_for(shape.capacity_rows);
  index_ = whole_pages(4096 + kPeers * sizeof(Epochs::Block));
  rows_ = index_ + whole_pages(BucketIndex::bytes_for(shape.capacity_rows));
  return rows_ + whole_pages(RowArena::bytes_for(row_stride_bytes(shape.row_type, shape.dim), rows));
}

void SharedArea::map() {
  void* mapped = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, descriptor_, 0);
  if (mapped == MAP_FAILED) fail_with_errno("cannot be mapped");
  data_ = static_cast<std::byte*>(mapped);
#ifdef MADV_HUGEPAGE
  madvise(data_, bytes_, MADV_HUGEPAGE);  // refused where shared memory has no huge pages; small ones do
#endif
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
      return;
    }
  fail("is shared by " + std::to_string(kPeers) + " processes already, the most there may be");
}

void SharedArea::clear_if_gone(uint32_t peer, Epochs::Block& block) {
  if (peer == peer_ || !lock(peer, F_WRLCK)) return;
  block.clear();
  lock(peer, F_UNLCK);
}

// In a forked child, too: there it closes its copies, and the locks stay the parent's.
void SharedArea::let_go() {
  if (data_) munmap(data_, bytes_);
  if (descriptor_ >= 0) close(descriptor_);
}

void SharedArea::fail(const std::string& reason) const { throw SharedFault{path_, reason}; }

void SharedArea::fail_with_errno(const std::string& what) const { fail(what + ": " + std::strerror(errno)); }

}  // namespace hotrow
