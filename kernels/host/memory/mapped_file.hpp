// A file mapped read-only, and whether it is still the file that was mapped.
#pragma once

#include <sys/stat.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace hotrow {

// A file cannot be read, or has the wrong content.
struct FileFault {
  std::string file;
  std::string reason;
};

class MappedFile {
 public:
  // Maps the whole file. Throws FileFault.
  explicit MappedFile(const std::string& path);
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  const std::string& path() const { return path_; }
  const std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }

  // How the file changed since it was mapped; empty if it did not. A file that was deleted or replaced by a rename did
  // not change. One system call.
  std::string change() const;

  // Ask the system to read [begin, begin + bytes) of the mapping soon, without waiting.
  void will_need(size_t begin, size_t bytes) const;

  // Read [begin, begin + bytes) into memory and map it, in huge pages if the system has them for files. Every row of a
  // lookup is in another page, so huge pages save most misses of the translation caches. Unreadable parts are skipped.
  void populate(size_t begin, size_t bytes) const;

  // Whether the page at `at` is in memory.
  bool is_resident(size_t at) const;

 private:
  const std::string path_;
  const int descriptor_;
  size_t bytes_ = 0;
  timespec written_{};  // when it was last written to
  const std::byte* data_ = nullptr;
};

}  // namespace hotrow
