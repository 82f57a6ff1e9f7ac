// A device that is not the CPU: its memory is the host's and its kernels are the CPU's, its rules are
// an accelerator's. What it promises stands in __init__.py.
#include <torch/extension.h>

#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace {
using at::IntArrayRef;
using at::Scalar;
using at::ScalarType;
using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
constexpr auto kSim = c10::DeviceType::PrivateUse1;
const c10::Device kDevice(kSim, 0);

// ---------------------------------------------------------------------------------------------
// The log, and how far the device is behind the host

struct Operation {
  std::string name;
  int64_t bytes = 0;
  int64_t flops = 0;
  ScalarType dtype = at::kFloat;  // of the factors of a product
  bool launches = true;
  bool waits = false;
};

struct Arriving {  // a copy to pinned memory that the device has not made yet
  int64_t launch;
  Tensor target, value;
};

std::recursive_mutex mutex;
std::vector<Operation> operations;
std::deque<Arriving> arriving;
bool is_counting = false;
bool is_shape_only = false;
int64_t issued = 0;  // launches so far
int64_t waited = 0;  // launches that the host has waited for
int64_t lag = 10;    // launches that the device is behind the host
int64_t current_bytes = 0, peak_bytes = 0;

using Lock = std::lock_guard<std::recursive_mutex>;

bool is_reached(int64_t launch) { return launch <= waited || issued - launch >= lag; }

void deliver() {
  while (!arriving.empty() && is_reached(arriving.front().launch)) {
    at::NoGradGuard no_grad;
    arriving.front().target.copy_(arriving.front().value);
    arriving.pop_front();
  }
}

void note(Operation operation) {
  Lock lock(mutex);
  issued += operation.launches;
  if (operation.waits) waited = issued;
  if (is_counting) operations.push_back(std::move(operation));
  deliver();
}

void note_wait(const char* name) { note({name, 0, 0, at::kFloat, false, true}); }

// ---------------------------------------------------------------------------------------------
// Memory

struct Block {  // what a storage owns: memory of its own, or the result of a kernel of the CPU
  size_t size;
  void* memory = nullptr;
  c10::Storage result;
  explicit Block(size_t n) : size(n) {
    Lock lock(mutex);
    current_bytes += size;
    peak_bytes = std::max(peak_bytes, current_bytes);
  }
  ~Block() {
    std::free(memory);
    Lock lock(mutex);
    current_bytes -= size;
  }
};

void release(void* block) { delete static_cast<Block*>(block); }

struct SimAllocator final : at::Allocator {
  at::DataPtr allocate(size_t size) override {
    auto* block = new Block(size);
    if (size && !is_shape_only) {
      block->memory = std::aligned_alloc(64, (size + 63) / 64 * 64);
      TORCH_CHECK(block->memory, "expected memory for ", size, " bytes, there is none");
      std::memset(block->memory, 0xFF, size);  // NaN: what is read before it is written shows
    }
    return {block->memory, block, &release, kDevice};
  }
  void copy_data(void* to, const void* from, std::size_t size) const override {
    std::memcpy(to, from, size);
  }
};
SimAllocator allocator;
REGISTER_ALLOCATOR(kSim, &allocator);

std::map<const char*, size_t> pinned;  // where it begins, and its size

void release_pinned(void* memory) {
  {
    Lock lock(mutex);
    pinned.erase(static_cast<const char*>(memory));
  }
  std::free(memory);
}

struct PinnedAllocator final : at::Allocator {
  at::DataPtr allocate(size_t size) override {
    void* memory = std::aligned_alloc(64, std::max<size_t>((size + 63) / 64 * 64, 64));
    Lock lock(mutex);
    pinned[static_cast<const char*>(memory)] = size;
    return {memory, memory, &release_pinned, at::Device(at::kCPU)};
  }
  void copy_data(void* to, const void* from, std::size_t size) const override {
    std::memcpy(to, from, size);
  }
};
PinnedAllocator pinned_allocator;

bool is_pinned(const void* pointer) {
  Lock lock(mutex);
  auto* begin = static_cast<const char*>(pointer);
  auto after = pinned.upper_bound(begin);
  if (after == pinned.begin()) return false;
  --after;
  return begin < after->first + std::max<size_t>(after->second, 1);
}

// ---------------------------------------------------------------------------------------------
// Streams, events, hooks

struct Guard final : c10::impl::DeviceGuardImplInterface {
  using Stream = c10::Stream;
  static Stream only() { return Stream(Stream::DEFAULT, kDevice); }
  c10::DeviceType type() const override { return kSim; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  Stream getStream(c10::Device) const noexcept override { return only(); }
  Stream getDefaultStream(c10::Device) const override { return only(); }
  Stream getStreamFromGlobalPool(c10::Device, bool) const override { return only(); }
  Stream getNewStream(c10::Device, int) const override { return only(); }
  Stream exchangeStream(Stream) const noexcept override { return only(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<int64_t*>(event);
  }
  void record(void** event, const Stream&, c10::DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new int64_t;
    Lock lock(mutex);
    *static_cast<int64_t*>(*event) = issued;
  }
  void block(void*, const Stream&) const override {}  // the device waits, the host does not
  bool queryEvent(void* event) const override {
    Lock lock(mutex);
    return !event || is_reached(*static_cast<int64_t*>(event));
  }
  void synchronizeEvent(void* event) const override {
    if (!queryEvent(event)) note_wait("event");
  }
  bool queryStream(const Stream&) const override {
    Lock lock(mutex);
    return waited == issued;
  }
  void synchronizeStream(const Stream&) const override { note_wait("synchronize"); }
  void synchronizeDevice(c10::DeviceIndex) const override { note_wait("synchronize"); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::detail::createCPUGenerator();
  }
  at::Device getDeviceFromPtr(void*) const override { return kDevice; }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    auto memory = allocator.allocate(size);
    if (memory.get() && impl->data())
      std::memcpy(memory.get(), impl->data(), std::min(size, impl->nbytes()));
    impl->set_data_ptr_noswap(std::move(memory));
    impl->set_nbytes(size);
  }
};
Hooks hooks;
const bool is_registered = [] {
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return true;
}();

// ---------------------------------------------------------------------------------------------
// Tensors of the device as tensors of the CPU (or without data, of meta), and back

Tensor with_storage(c10::Storage storage, DispatchKey key, const Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_storage_offset(like.storage_offset());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
  return made;
}

Tensor as_cpu(const Tensor& x) {  // over the same memory
  if (x.device().is_cpu()) return x;
  const auto size = x.storage().nbytes();
  auto* memory = const_cast<void*>(x.storage().data());
  TORCH_CHECK(
      memory || !size,
      "expected a tensor with data, got one that was made in shape-only mode: nothing can read it");
  auto impl = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), size, at::DataPtr(memory, at::Device(at::kCPU)),
      c10::GetCPUAllocator(), /*resizable=*/true);
  return with_storage(c10::Storage(std::move(impl)), DispatchKey::CPU, x);
}

Tensor as_meta(const Tensor& x) {
  if (x.device().is_cpu()) return x;  // a number
  return at::empty_strided(x.sizes(), x.strides(), x.options().device(at::kMeta));
}

c10::Storage held(const c10::Storage& storage) {  // memory of the CPU, owned by the device
  auto* block = new Block(storage.nbytes());
  block->result = storage;
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), storage.nbytes(),
      at::DataPtr(const_cast<void*>(storage.data()), block, &release, kDevice), &allocator,
      /*resizable=*/true));
}

Tensor from_kernel(const Tensor& found, const std::vector<Tensor>& given) {
  TORCH_CHECK(
      found.layout() == at::kStrided, "the simulated device has no layout ", found.layout());
  if (found.device().is_meta()) {
    const auto size = found.storage().nbytes();  // a reduced result may keep the memory it began with
    return with_storage(
        c10::Storage(c10::make_intrusive<c10::StorageImpl>(
            c10::StorageImpl::use_byte_size_t(), size, allocator.allocate(size), &allocator,
            /*resizable=*/true)),
        DispatchKey::PrivateUse1, found);
  }
  for (const auto& x : given)
    if (found.numel() && x.storage().data() == found.storage().data())
      return with_storage(x.storage(), DispatchKey::PrivateUse1, found);  // a view
  return with_storage(held(found.storage()), DispatchKey::PrivateUse1, found);
}

void take_over_resize(const Tensor& x, const Tensor& found) {
  auto* impl = x.unsafeGetTensorImpl();
  if (found.device().is_meta()) {
    if (x.sizes() != found.sizes()) at::native::resize_(x, found.sizes(), std::nullopt);
    return;
  }
  if (found.storage().data() != x.storage().data()) {
    auto storage = held(found.storage());
    auto* own = x.storage().unsafeGetStorageImpl();
    own->set_nbytes(storage.nbytes());
    own->set_data_ptr_noswap(storage.unsafeGetStorageImpl()->set_data_ptr(at::DataPtr()));
  }
  impl->set_sizes_and_strides(found.sizes(), found.strides());
}

// ---------------------------------------------------------------------------------------------
// What an operation costs

const std::set<std::string> kWaits = {
    "nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive",
    "equal", "bincount", "_local_scalar_dense"};
const std::set<std::string> kOverwrite = {  // in place, without a look at what was there
    "zero_", "fill_", "uniform_", "normal_", "random_", "bernoulli_", "exponential_", "zero",
    "fill", "uniform", "normal", "random", "bernoulli", "exponential"};
const std::set<std::string> kGather = {
    "index", "index_select", "gather", "embedding", "take", "_unsafe_index"};
const std::set<std::string> kScatter = {
    "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_",
    "index_add", "index_add_", "index_copy", "index_copy_", "index_fill", "index_fill_",
    "_index_put_impl_", "put_"};
// The place of the first factor among the arguments.
const std::map<std::string, size_t> kProducts = {
    {"mm", 0}, {"bmm", 0}, {"mv", 0}, {"dot", 0}, {"vdot", 0}, {"addmm", 1}, {"_addmm_activation", 1},
    {"baddbmm", 1}, {"addbmm", 1}, {"addmv", 1}};

std::string short_name(const c10::FunctionSchema& schema) {
  const auto& name = schema.name();
  const auto place = name.find("::");
  return name.compare(0, place, "aten") == 0 ? name.substr(place + 2) : name;
}

int64_t bytes_of(const Tensor& x) {  // what broadcasts stands in memory once
  int64_t count = 1;
  for (int64_t i = 0; i < x.dim(); i++)
    if (x.stride(i) != 0 || x.size(i) == 0) count *= x.size(i);
  return count * static_cast<int64_t>(x.element_size());
}

template <typename F>
void for_each_tensor(const IValue& value, F&& function) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) function(value.toTensor());
  } else if (value.isTensorList()) {
    for (const Tensor& x : value.toTensorVector())
      if (x.defined()) function(x);
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<Tensor>& x : value.toOptionalTensorVector())
      if (x && x->defined()) function(*x);
  }
}

template <typename F>
IValue with_each_tensor(const IValue& value, F&& function) {
  if (value.isTensor()) {
    return value.toTensor().defined() ? IValue(function(value.toTensor())) : value;
  } else if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& x : value.toTensorVector()) list.push_back(x.defined() ? function(x) : x);
    return list;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& x : value.toOptionalTensorVector())
      list.push_back(x && x->defined() ? std::optional<Tensor>(function(*x)) : x);
    return list;
  }
  return value;
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() && argument.alias_info()->isWrite();
}

bool is_index(const std::string& name) {
  return name == "index" || name == "_index_put_impl_" || name == "_unsafe_index";
}

// A GPU's kernel takes a number from the host, and nothing else.
void refuse_cpu_tensors(
    const c10::FunctionSchema& schema, const std::string& name, at::ArrayRef<IValue> arguments) {
  bool on_device = false, on_cpu = false;
  for (size_t i = 0; i < arguments.size(); i++) {
    if (is_index(name) && i == 1) continue;
    const bool written = is_written(schema.arguments()[i]);
    for_each_tensor(arguments[i], [&](const Tensor& x) {
      if (!x.device().is_cpu()) on_device = true;
      else if (x.dim() > 0 || written) on_cpu = true;
    });
  }
  TORCH_CHECK(
      !on_cpu || (!on_device && !is_index(name)),
      "Expected all tensors to be on the same device, but found cpu and ", kDevice, " in ", name);
}

// An index on the CPU is copied to the device; the places of a mask have to be counted first.
void note_index(const IValue& index) {
  for_each_tensor(index, [](const Tensor& x) {
    const bool is_mask = x.scalar_type() == at::kBool || x.scalar_type() == at::kByte;
    TORCH_CHECK(
        !(is_shape_only && is_mask), "an index by a mask reads values, which shape-only mode has not");
    if (x.device().is_cpu()) note({"copy", 2 * bytes_of(x), 0, x.scalar_type(), true, true});
    else if (is_mask) note({"nonzero", bytes_of(x), 0, x.scalar_type(), true, true});
  });
}

Operation cost_of(
    const c10::FunctionSchema& schema, const std::string& name, at::ArrayRef<IValue> arguments) {
  Operation cost{name};
  cost.waits = kWaits.count(name) ||
      (name == "repeat_interleave" && arguments.size() == 2 && arguments[1].isNone());
  int64_t first = 0;   // bytes of the first argument
  int64_t others = 0;  // of all others that are read
  const c10::TensorImpl* self = nullptr;
  bool is_in_place = false;
  for (size_t i = 0; i < arguments.size(); i++) {
    const auto& argument = schema.arguments()[i];
    for_each_tensor(arguments[i], [&](const Tensor& x) {
      if (x.device().is_cpu()) return;
      const auto size = bytes_of(x);
      if (i == 0) self = x.unsafeGetTensorImpl();
      const bool written = is_written(argument);
      if (argument.is_out()) {
        is_in_place |= x.unsafeGetTensorImpl() == self;
        cost.bytes += size;
        return;
      }
      if (written) {
        cost.bytes += size;
        is_in_place |= i == 0;
        if (kOverwrite.count(name)) return;
      }
      (i == 0 ? first : others) += size;
    });
  }
  if (kGather.count(name)) {
    first = cost.bytes;  // as many entries are read as are written
  } else if (kScatter.count(name) && is_in_place) {
    // The entries and their places are read, and as many are read and written there.
    const auto& places = arguments[name == "_index_put_impl_" ? 1 : 2];
    int64_t count = 0;
    for_each_tensor(places, [&](const Tensor& x) { count = std::max(count, x.numel()); });
    for_each_tensor(arguments[name == "_index_put_impl_" ? 2 : std::min<size_t>(3, arguments.size() - 1)],
        [&](const Tensor& x) { count = std::max(count, x.numel()); });
    cost.bytes = 0;
    for_each_tensor(arguments[0], [&](const Tensor& x) {
      first = 2 * std::min(count * static_cast<int64_t>(x.element_size()), bytes_of(x));
    });
  }
  cost.bytes += first + others;
  const auto product = name.substr(0, name.find_last_not_of('_') + 1);  // `addmv_` in place
  if (const auto found = kProducts.find(product); found != kProducts.end()) {
    const auto& left = arguments[found->second].toTensor();
    const auto& right = arguments[found->second + 1].toTensor();
    cost.flops = 2 * left.numel() * (right.dim() > 1 ? right.size(-1) : 1);
    cost.dtype = left.scalar_type();
  }
  return cost;
}

// ---------------------------------------------------------------------------------------------
// Every operation that has no kernel below

void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto name = short_name(schema);
  const auto num_arguments = schema.arguments().size();
  const auto num_returns = schema.returns().size();
  const auto begin = stack->size() - num_arguments;
  const std::vector<IValue> arguments(stack->begin() + begin, stack->end());
  refuse_cpu_tensors(schema, name, arguments);
  auto cost = cost_of(schema, name, arguments);
  if (is_index(name)) note_index(arguments[1]);
  TORCH_CHECK(
      !(is_shape_only && cost.waits), name, " reads values, which shape-only mode has not");

  std::vector<Tensor> given;
  for (size_t i = 0; i < num_arguments; i++) {
    auto& value = (*stack)[begin + i];
    for_each_tensor(value, [&](const Tensor& x) {
      if (!x.device().is_cpu()) given.push_back(x);
    });
    if (value.isDevice()) value = is_shape_only ? c10::Device(at::kMeta) : c10::Device(at::kCPU);
    value = with_each_tensor(value, is_shape_only ? as_meta : as_cpu);
  }
  const std::vector<IValue> handed(stack->begin() + begin, stack->end());
  op.redispatchBoxed(
      DispatchKeySet(is_shape_only ? DispatchKey::Meta : DispatchKey::CPU), stack);

  for (size_t i = 0; i < num_arguments; i++) {
    if (!is_written(schema.arguments()[i]) || !arguments[i].isTensor()) continue;
    const auto& x = arguments[i].toTensor();
    if (x.defined() && !x.device().is_cpu()) take_over_resize(x, handed[i].toTensor());
  }
  for (size_t i = 0; i < num_returns; i++) {
    auto& value = (*stack)[stack->size() - num_returns + i];
    if (is_written(schema.returns()[i])) {
      for (size_t j = 0; j < num_arguments; j++)
        if (is_written(schema.arguments()[j]) &&
            *schema.arguments()[j].alias_info() == *schema.returns()[i].alias_info())
          value = arguments[j];
      continue;
    }
    value = with_each_tensor(value, [&](const Tensor& x) { return from_kernel(x, given); });
    for_each_tensor(value, [&](const Tensor& x) {
      cost.bytes += bytes_of(x) * (kGather.count(name) ? 2 : 1);
    });
  }
  note(std::move(cost));
}

// ---------------------------------------------------------------------------------------------
// Memory, views and copies

Tensor empty(
    IntArrayRef size, std::optional<ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      size, &allocator, DispatchKeySet(DispatchKey::PrivateUse1), c10::dtype_or_default(dtype),
      format);
}

Tensor zeros_without_memory(
    IntArrayRef size, std::optional<ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>) {
  static at::native::ZeroTensorAllocator nothing(kDevice);
  const DispatchKeySet keys({DispatchKey::PrivateUse1, DispatchKey::ZeroTensor});
  return at::detail::empty_generic(
      size, &nothing, keys, c10::dtype_or_default(dtype), std::nullopt);
}

Tensor empty_strided(
    IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      size, stride, &allocator, DispatchKeySet(DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

// Between host and device the host waits, unless its memory is pinned and it says that it will not.
Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  const bool to_host = to.device().is_cpu(), from_host = from.device().is_cpu();
  const auto& host = to_host ? to : from;
  const bool is_asynchronous =
      non_blocking && host.numel() && is_pinned(host.storage().data());
  Operation cost{"copy", bytes_of(from) + bytes_of(to)};
  cost.waits = (to_host || from_host) && !is_asynchronous;
  TORCH_CHECK(
      !(is_shape_only && to_host), "a copy to the host reads values, which shape-only mode has not");
  if (!to.numel()) return to;
  note(cost);
  if (is_shape_only) return to;
  at::NoGradGuard no_grad;
  if (!to_host || !is_asynchronous) {
    as_cpu(to).copy_(as_cpu(from));
    return to;
  }
  auto value = at::empty_like(to, to.options().pinned_memory(false));
  value.copy_(as_cpu(from));
  if (to.is_non_overlapping_and_dense())  // whoever reads it now reads NaN
    std::memset(to.mutable_data_ptr(), 0xFF, to.nbytes());
  Lock lock(mutex);
  arriving.push_back({issued, to, value});
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

Scalar local_scalar_dense(const Tensor& self) {
  TORCH_CHECK(!is_shape_only, "item() reads a value, which shape-only mode has not");
  note_wait("item");
  return as_cpu(self).item();
}

Tensor view(const Tensor& self, IntArrayRef size) { return at::native::view(self, size); }
Tensor reshape_alias(const Tensor& self, IntArrayRef size, IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}
Tensor as_strided(
    const Tensor& self, IntArrayRef size, IntArrayRef stride,
    std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}
Tensor unfold(const Tensor& self, int64_t dim, int64_t size, int64_t step) {
  return at::native::unfold(self, dim, size, step);
}
const Tensor& resize_(
    const Tensor& self, IntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, size, format);
}

Tensor& set_strided(
    Tensor& self, at::Storage source, int64_t offset, IntArrayRef size,
    IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  impl->set_sizes_and_strides(size, stride);
  return self;
}
Tensor& set_storage(Tensor& self, at::Storage source) {
  const auto count = static_cast<int64_t>(source.nbytes() / self.element_size());
  const std::vector<int64_t> size{count}, stride{1};
  return set_strided(self, std::move(source), 0, size, stride);
}
Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_strided(
      self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

// ---------------------------------------------------------------------------------------------
// Products of halves that come back in fp32, as on a GPU

Tensor widened(const Tensor& self, const Tensor& other, ScalarType dtype, const char* name) {
  const bool is_half = self.scalar_type() == at::kHalf || self.scalar_type() == at::kBFloat16;
  TORCH_CHECK(
      self.scalar_type() == other.scalar_type() &&
          (dtype == self.scalar_type() || (is_half && dtype == at::kFloat)),
      name, ": expected out_dtype to be that of the factors, or fp32 of two halves of one dtype, got ",
      dtype, " of ", self.scalar_type(), " and ", other.scalar_type());
  return as_cpu(self).to(dtype);
}

// `addend` may be undefined. One launch: `factor * (left @ right) + beta * addend`.
Tensor product(
    const char* name, const std::optional<Tensor>& addend, const Tensor& left, const Tensor& right,
    ScalarType dtype, const Scalar& beta, const Scalar& alpha) {
  for (const auto* x : {&left, &right, addend ? &*addend : &left})
    TORCH_CHECK(!x->device().is_cpu(), "Expected all tensors to be on the same device in ", name);
  const bool is_batched = left.dim() == 3;
  std::vector<int64_t> shape = left.sizes().vec();
  shape.back() = right.size(-1);
  auto out = at::empty(shape, left.options().dtype(dtype));
  Operation cost{name, bytes_of(left) + bytes_of(right) + bytes_of(out)};
  if (addend) cost.bytes += bytes_of(*addend);
  cost.flops = 2 * left.numel() * right.size(-1);
  cost.dtype = left.scalar_type();
  if (!is_shape_only) {
    auto a = widened(left, right, dtype, name), b = as_cpu(right).to(dtype);
    auto target = as_cpu(out);
    if (addend) {
      auto c = as_cpu(*addend).to(dtype);
      is_batched ? at::baddbmm_out(target, c, a, b, beta, alpha)
                 : at::addmm_out(target, c, a, b, beta, alpha);
    } else {
      is_batched ? at::bmm_out(target, a, b) : at::mm_out(target, a, b);
    }
  }
  note(cost);
  return out;
}

Tensor mm(const Tensor& a, const Tensor& b, ScalarType dtype) {
  return product("mm", std::nullopt, a, b, dtype, 1, 1);
}
Tensor bmm(const Tensor& a, const Tensor& b, ScalarType dtype) {
  return product("bmm", std::nullopt, a, b, dtype, 1, 1);
}
Tensor addmm(
    const Tensor& c, const Tensor& a, const Tensor& b, ScalarType dtype, const Scalar& beta,
    const Scalar& alpha) {
  return product("addmm", c, a, b, dtype, beta, alpha);
}
Tensor baddbmm(
    const Tensor& c, const Tensor& a, const Tensor& b, ScalarType dtype, const Scalar& beta,
    const Scalar& alpha) {
  return product("baddbmm", c, a, b, dtype, beta, alpha);
}
}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_efficientzerotensor", &zeros_without_memory);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("as_strided", &as_strided);
  m.impl("unfold", &unfold);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &set_strided);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("mm.dtype", &mm);
  m.impl("bmm.dtype", &bmm);
  m.impl("addmm.dtype", &addmm);
  m.impl("baddbmm.dtype", &baddbmm);
}

// What the CPU has a kernel of its own for is one launch, also where PyTorch would compose it of
// others for a device that it does not know; and so is an operation over a list of tensors.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  static const std::set<std::string> views_and_copies = {
      "empty", "empty_strided", "_efficientzerotensor", "_local_scalar_dense", "view", "_reshape_alias", "as_strided",
      "unfold", "resize_", "set_"};
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0 || views_and_copies.count(name.name.substr(6))) continue;
    const auto op = dispatcher.findOp(name);
    if (!op->hasKernelForDispatchKey(DispatchKey::CPU) && name.name.rfind("aten::_foreach_", 0) != 0)
      continue;
    const auto full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    m.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&run>());
  }
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {  // CUDA's lists
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define SINGLE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define SINGLE_OPTION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(SINGLE)
  AT_FORALL_FP32_SET_OPT_DTYPE(SINGLE_OPTION)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(WIDEST)
  KERNEL_PRIVATEUSEONE(stack, promote)
  KERNEL_PRIVATEUSEONE(cat, promote)
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("begin", [] {
    Lock lock(mutex);
    operations.clear();
    is_counting = true;
    peak_bytes = current_bytes;
    return current_bytes;
  });
  m.def("end", [] {
    Lock lock(mutex);
    is_counting = false;
    py::list found;
    for (const auto& x : operations)
      found.append(py::make_tuple(x.name, x.bytes, x.flops, x.dtype, x.launches, x.waits));
    operations.clear();
    return py::make_tuple(found, peak_bytes);
  });
  m.def("memory_allocated", [] { return current_bytes; });
  m.def("max_memory_allocated", [] { return peak_bytes; });
  m.def("reset_peak_memory_stats", [] {
    Lock lock(mutex);
    peak_bytes = current_bytes;
  });
  m.def("synchronize", [] { note_wait("synchronize"); });
  m.def("set_lag", [](int64_t launches) {
    Lock lock(mutex);
    std::swap(lag, launches);
    return launches;
  });
  m.def("set_shape_only", [](bool value) {
    std::swap(is_shape_only, value);
    return value;
  });
}
