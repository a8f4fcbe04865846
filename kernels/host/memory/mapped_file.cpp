#include "memory/mapped_file.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "memory/mapped_reads.hpp"

namespace hotrow {
namespace {

constexpr size_t kPage = 4096;

}  // namespace

// NONBLOCK: a pipe of this name is refused at once.
MappedFile::MappedFile(const std::string& path)
    : path_(path), descriptor_(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
  const auto fail = [&] { throw FileFault{path, std::string("cannot be opened: ") + std::strerror(errno)}; };
  if (descriptor_ < 0) fail();
  try {
    install_mapped_read_handler();
    struct stat found = {};
    if (fstat(descriptor_, &found) != 0) fail();
    if (!S_ISREG(found.st_mode)) throw FileFault{path, "not a regular file"};
    if (found.st_size == 0) throw FileFault{path, "the file is empty"};
    bytes_ = static_cast<size_t>(found.st_size);
    written_ = found.st_mtim;
    void* mapped = mmap(nullptr, bytes_, PROT_READ, MAP_SHARED, descriptor_, 0);
    if (mapped == MAP_FAILED) fail();
    data_ = static_cast<const std::byte*>(mapped);
    // Lookups read pages in no order: a page fault must not read thirty pages around the page.
    madvise(mapped, bytes_, MADV_RANDOM);
  } catch (...) {
    close(descriptor_);
    throw;
  }
}

MappedFile::~MappedFile() {
  munmap(const_cast<std::byte*>(data_), bytes_);
  close(descriptor_);
}

std::string MappedFile::change() const {
  struct stat found = {};
  if (fstat(descriptor_, &found) != 0) return std::string("cannot be inspected: ") + std::strerror(errno);
  if (static_cast<size_t>(found.st_size) != bytes_)
    return "changed from " + std::to_string(bytes_) + " to " + std::to_string(found.st_size) +
           " bytes while it was open";
  if (found.st_mtim.tv_sec != written_.tv_sec || found.st_mtim.tv_nsec != written_.tv_nsec)
    return "was written to while it was open";
  return {};
}

void MappedFile::will_need(size_t begin, size_t bytes) const {
  const size_t first = begin / kPage * kPage, end = std::min(begin + bytes, bytes_);
  if (first < end) madvise(const_cast<std::byte*>(data_) + first, end - first, MADV_WILLNEED);
}

void MappedFile::populate(size_t begin, size_t bytes) const {
  const size_t end = std::min(begin + bytes, bytes_);
  if (begin >= end) return;
  auto* first = const_cast<std::byte*>(data_) + begin / kPage * kPage;
  const auto length = static_cast<size_t>(data_ + end - first);
#ifdef MADV_HUGEPAGE
  madvise(first, length, MADV_HUGEPAGE);  // systems without huge pages refuse it
#endif
  constexpr int kPopulateRead = 22;  // MADV_POPULATE_READ of Linux 5.14; unlike a load it raises no signal
  if (madvise(first, length, kPopulateRead) != 0) madvise(first, length, MADV_WILLNEED);
}

bool MappedFile::is_resident(size_t at) const {
  unsigned char state = 0;
  void* page = const_cast<std::byte*>(data_) + at / kPage * kPage;
  return mincore(page, kPage, &state) != 0 || (state & 1);  // if the system does not say, nothing is prefetched
}

}  // namespace hotrow
