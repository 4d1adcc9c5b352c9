// What the cases share: random inputs that are the same on every processor, and a record of the outputs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace plait::cases {

// Integers by SplitMix64 (Steele et al., 2014), and numbers made of them without rounding.
class Draw {
 public:
  explicit Draw(std::uint64_t seed) : state_(seed) {}

  std::uint64_t next() {
    std::uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  // From 0 to count - 1.
  std::int64_t below(std::int64_t count) {
    return static_cast<std::int64_t>(next() % static_cast<std::uint64_t>(count));
  }
  // From -1 up to 1.
  float uniform() {
    return static_cast<float>(static_cast<std::int32_t>(next() >> 40) - (1 << 23)) * 0x1p-23f;
  }
  // A bell about 0 with a standard deviation of about 1: four uniform numbers added up.
  float normal() {
    std::int32_t sum = 0;
    for (int i = 0; i < 4; ++i) sum += static_cast<std::int32_t>(next() >> 43) - (1 << 20);
    return static_cast<float>(sum) * 0x1p-20f;
  }
  // Any float32 that there is: infinities, NaN and denormal numbers among them.
  float any() { return __builtin_bit_cast(float, static_cast<std::uint32_t>(next() >> 32)); }

  std::vector<float> normals(std::int64_t count, float scale = 1, float offset = 0) {
    std::vector<float> out(static_cast<std::size_t>(count));
    for (float& x : out) x = normal() * scale + offset;
    return out;
  }
  std::vector<float> uniforms(std::int64_t count) {
    std::vector<float> out(static_cast<std::size_t>(count));
    for (float& x : out) x = uniform();
    return out;
  }
  std::vector<float> anything(std::int64_t count) {
    std::vector<float> out(static_cast<std::size_t>(count));
    for (float& x : out) x = any();
    return out;
  }
  // 0 .. count - 1 in some order.
  std::vector<std::int32_t> order(std::int32_t count) {
    std::vector<std::int32_t> out(static_cast<std::size_t>(count));
    for (std::int32_t i = 0; i < count; ++i) {
      const std::size_t other = static_cast<std::size_t>(below(i + 1));
      out[static_cast<std::size_t>(i)] = out[other];
      out[other] = i;
    }
    return out;
  }

 private:
  std::uint64_t state_;
};

// Exactly so many bytes at a multiple of 64, all ones (NaN in every float format) at first.
class Bytes {
 public:
  explicit Bytes(std::int64_t size);
  std::byte* data() const { return data_.get(); }
  std::int64_t size() const { return size_; }

 private:
  struct Free {
    void operator()(std::byte* p) const;
  };
  std::int64_t size_;
  std::unique_ptr<std::byte, Free> data_;
};

// The outputs of named cases, in a file of entries
//
//     <name> <type: f4, f8, i8 or u1> <count>\n <count numbers, as they lie in memory>
//
// A name that comes again stands for another way to the same numbers: it must bring the same bits (else an
// exception says which do not), and is not written again. All NaN are one: their signs and payloads differ
// between processors, and nothing depends on them.
class Record {
 public:
  explicit Record(const std::string& path);

  void floats(const std::string& name, const float* x, std::int64_t count);
  void floats(const std::string& name, const std::vector<float>& x) { floats(name, x.data(), std::ssize(x)); }
  void doubles(const std::string& name, const std::vector<double>& x);
  void integers(const std::string& name, const std::vector<std::int64_t>& x);
  void bytes(const std::string& name, const std::byte* x, std::int64_t count);

  std::int64_t cases() const { return static_cast<std::int64_t>(seen_.size()); }
  // FNV-1a of every entry's hash, in order of their names: one number for a whole run.
  std::uint64_t hash() const;
  // Writes what is left; throws std::runtime_error where the file could not be written.
  void close();

 private:
  void put(const std::string& name, const char* type, const void* x, std::int64_t count, std::int64_t bytes);

  std::ofstream out_;
  std::map<std::string, std::uint64_t> seen_;
};

void linear_cases(Record& record);
void attention_cases(Record& record);
void recurrence_cases(Record& record);
void row_cases(Record& record);
void sampling_cases(Record& record);

}  // namespace plait::cases
