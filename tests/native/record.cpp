#include "record.hpp"

#include <cstring>
#include <new>
#include <stdexcept>

namespace plait::cases {
namespace {

constexpr std::align_val_t kAlignment{64};

std::uint64_t fnv(const void* data, std::int64_t bytes, std::uint64_t hash = 0xcbf29ce484222325u) {
  const auto* p = static_cast<const unsigned char*>(data);
  for (std::int64_t i = 0; i < bytes; ++i) hash = (hash ^ p[i]) * 0x100000001b3u;
  return hash;
}

template <class T>
std::vector<T> with_one_nan(const T* x, std::int64_t count) {
  std::vector<T> out(x, x + count);
  for (T& value : out) {
    if (value != value) value = static_cast<T>(__builtin_nanf(""));
  }
  return out;
}

}  // namespace

Bytes::Bytes(std::int64_t size)
    : size_(size),
      data_(static_cast<std::byte*>(::operator new(static_cast<std::size_t>(size), kAlignment))) {
  std::memset(data_.get(), 0xff, static_cast<std::size_t>(size));
}

void Bytes::Free::operator()(std::byte* p) const { ::operator delete(p, kAlignment); }

Record::Record(const std::string& path) : out_(path, std::ios::binary) {
  if (!out_) throw std::runtime_error("cannot write " + path);
}

void Record::floats(const std::string& name, const float* x, std::int64_t count) {
  put(name, "f4", with_one_nan(x, count).data(), count, 4 * count);
}

void Record::doubles(const std::string& name, const std::vector<double>& x) {
  put(name, "f8", with_one_nan(x.data(), std::ssize(x)).data(), std::ssize(x), 8 * std::ssize(x));
}

void Record::integers(const std::string& name, const std::vector<std::int64_t>& x) {
  put(name, "i8", x.data(), std::ssize(x), 8 * std::ssize(x));
}

void Record::bytes(const std::string& name, const std::byte* x, std::int64_t count) {
  put(name, "u1", x, count, count);
}

void Record::put(const std::string& name, const char* type, const void* x, std::int64_t count,
                 std::int64_t bytes) {
  const std::uint64_t hash = fnv(x, bytes);
  const auto [entry, fresh] = seen_.emplace(name, hash);
  if (!fresh) {
    if (entry->second != hash)
      throw std::runtime_error(name + " has other bits on another way to the same numbers");
    return;
  }
  out_ << name << ' ' << type << ' ' << count << '\n';
  out_.write(static_cast<const char*>(x), bytes);
}

std::uint64_t Record::hash() const {
  std::uint64_t all = fnv(nullptr, 0);
  for (const auto& [name, hash] : seen_)
    all = fnv(&hash, sizeof hash, fnv(name.data(), std::ssize(name), all));
  return all;
}

void Record::close() {
  out_.close();
  if (!out_) throw std::runtime_error("the record could not be written to its end");
}

}  // namespace plait::cases
