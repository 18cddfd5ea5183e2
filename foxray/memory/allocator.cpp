// An emulated GPU's memory on the CPU: an allocator around c10's own that counts what is live and raises
// a genuine torch.OutOfMemoryError, with CUDA's words, when a budget is used up.
//
// It is installed once and stays: with no active account it passes requests on, uncharged. It must not be
// taken out again, because oneDNN asks whichever allocator is current for raw memory and hands it back
// to whichever is current later (IDeepRegistration.cpp), so blocks outlive the budget they came from.
//
// Each block has a header right in front of the data. It names the account that was charged, so that a
// block freed late, or in another thread, gives its bytes back to the budget that they came from and to
// no other. An account is never freed: blocks may point at it for the rest of the process's life.

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <string>

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

namespace {

constexpr uint64_t kRounding = 512; // CUDA's caching allocator rounds every request up to this
constexpr uint64_t kOneExabyte = 1152921504606846976ULL; // above it CUDA has a message of its own
constexpr uint64_t kMark = 0x666f787261792121ULL;

struct Account {
  std::atomic<uint64_t> limit;
  std::atomic<uint64_t> live{0};
  std::atomic<uint64_t> peak{0};
  std::atomic<uint64_t> allocations{0};
  std::atomic<int64_t> until_failure{0}; // 0: off; k: the k-th allocation from now fails
  int gpu_index;
};

// 64 bytes, c10's alignment for CPU memory, so that the data behind it stays aligned.
struct alignas(64) Header {
  uint64_t mark; // kMark ^ address: a foreign block's bytes cannot pass for it, nor a moved copy's
  Account* account; // null: not charged
  uint64_t charged;
  void* inner_context;
  c10::DeleterFnPtr inner_deleter;
};
static_assert(sizeof(Header) == 64);

std::atomic<Account*> active{nullptr};
thread_local int host_depth = 0;
c10::Allocator* inner = nullptr;

uint64_t mark_of(const Header* header) {
  return kMark ^ reinterpret_cast<uint64_t>(header);
}

std::string readable(uint64_t bytes) {
  char text[32];
  if (bytes < 1024) {
    std::snprintf(text, sizeof text, "%llu bytes", static_cast<unsigned long long>(bytes));
    return text;
  }
  const char* units[] = {"KiB", "MiB", "GiB"};
  double scaled = static_cast<double>(bytes) / 1024;
  int unit = 0;
  while (scaled >= 1024 && unit < 2) {
    scaled /= 1024;
    ++unit;
  }
  std::snprintf(text, sizeof text, "%.2f %s", scaled, units[unit]);
  return text;
}

[[noreturn]] void raise_out_of_memory(const Account& account, uint64_t wanted, uint64_t live) {
  const uint64_t limit = account.limit.load();
  const std::string asked = readable(wanted), total = readable(limit), allocated = readable(live);
  const std::string free = readable(limit > live ? limit - live : 0);
  TORCH_CHECK_WITH(
      OutOfMemoryError,
      false,
      "CUDA out of memory. Tried to allocate ", asked, ". GPU ", account.gpu_index,
      " has a total capacity of ", total, " of which ", free, " is free. Of the allocated memory ",
      allocated, " is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated. ",
      "(This GPU is emulated on the CPU by foxray.)");
  std::abort(); // not reached: the check above always throws
}

// Takes `bytes` from the account or raises, in one step: two threads can neither overdraw it together
// nor both fail where one would have fitted.
void charge(Account& account, uint64_t bytes) {
  uint64_t live = account.live.load();
  if (account.until_failure.load() > 0 && account.until_failure.fetch_sub(1) == 1) {
    raise_out_of_memory(account, bytes, live);
  }
  do {
    const uint64_t limit = account.limit.load();
    if (bytes > limit || live > limit - bytes) {
      raise_out_of_memory(account, bytes, live);
    }
  } while (!account.live.compare_exchange_weak(live, live + bytes));
  account.allocations.fetch_add(1);
  uint64_t peak = account.peak.load();
  while (peak < live + bytes && !account.peak.compare_exchange_weak(peak, live + bytes)) {
  }
}

void release(void* data) {
  if (data == nullptr) {
    return;
  }
  Header* header = static_cast<Header*>(data) - 1;
  if (header->mark != mark_of(header)) {
    // A raw block from before the installation. Reading in front of it is safe: malloc keeps its own
    // bookkeeping there, in the same mapping.
    inner->raw_deallocate(data);
    return;
  }
  Account* account = header->account;
  const uint64_t charged = header->charged;
  void* inner_context = header->inner_context;
  const c10::DeleterFnPtr inner_deleter = header->inner_deleter;
  header->mark = 0; // whoever gets this memory next must not find a mark on it
  inner_deleter(inner_context);
  if (account != nullptr) {
    account->live.fetch_sub(charged);
  }
}

class BudgetAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) {
      return inner->allocate(0);
    }
    Account* account = host_depth == 0 ? active.load() : nullptr;
    if (account != nullptr) {
      TORCH_CHECK_WITH(
          OutOfMemoryError,
          bytes < kOneExabyte,
          "CUDA out of memory. Tried to allocate more than 1EB memory.");
    }
    // A size that would wrap around with the header is refused by the inner allocator in its own words.
    if (bytes > std::numeric_limits<size_t>::max() - sizeof(Header)) {
      return inner->allocate(bytes);
    }
    const uint64_t charged = account == nullptr ? 0 : (bytes + kRounding - 1) / kRounding * kRounding;
    if (account != nullptr) {
      charge(*account, charged);
    }
    try {
      c10::DataPtr block = inner->allocate(bytes + sizeof(Header));
      auto* header = static_cast<Header*>(block.get());
      const c10::DeleterFnPtr deleter = block.get_deleter();
      const c10::Device device = block.device();
      *header = Header{mark_of(header), account, charged, block.release_context(), deleter};
      // The context is the data itself: what makes raw_allocate() and copy-on-write storages possible.
      return {header + 1, header + 1, &release, device};
    } catch (...) {
      if (account != nullptr) {
        account->live.fetch_sub(charged);
      }
      throw;
    }
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }

  void copy_data(void* destination, const void* source, size_t bytes) const override {
    default_copy_data(destination, source, bytes);
  }
};

} // namespace

extern "C" {

void foxray_install() {
  if (inner == nullptr) {
    inner = c10::GetCPUAllocator();
    c10::SetCPUAllocator(new BudgetAllocator, 100);
  }
}

void* foxray_account(uint64_t limit, int gpu_index) {
  auto* account = new Account;
  account->limit = limit;
  account->gpu_index = gpu_index;
  return account;
}

void foxray_activate(void* account) {
  active.store(static_cast<Account*>(account));
}

void foxray_host_enter() {
  ++host_depth;
}

void foxray_host_leave() {
  --host_depth;
}

uint64_t foxray_live(void* account) {
  return static_cast<Account*>(account)->live.load();
}

uint64_t foxray_peak(void* account) {
  return static_cast<Account*>(account)->peak.load();
}

uint64_t foxray_allocations(void* account) {
  return static_cast<Account*>(account)->allocations.load();
}

void foxray_reset_peak(void* account) {
  auto* self = static_cast<Account*>(account);
  self->peak.store(self->live.load());
}

void foxray_set_limit(void* account, uint64_t limit) {
  static_cast<Account*>(account)->limit.store(limit);
}

void foxray_fail_at(void* account, int64_t k) {
  static_cast<Account*>(account)->until_failure.store(k);
}

} // extern "C"
