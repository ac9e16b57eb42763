// Aliases of device tensors, the delivery of results, and random numbers.
#include "operators.h"

namespace operators {

void check_access(const Tensor& tensor, c10::Device device) {
    const auto& storage = tensor.storage();
    if (!tensor.numel() || !storage.nbytes()) return;
    // A sticky error makes the launch check below throw, as it does after a kernel that went astray.
    cudasim_access(storage.data(), storage.nbytes(), device.index());
    C10_CUDA_CHECK(cudaPeekAtLastError() == cudaErrorIllegalAddress ? cudaErrorIllegalAddress : cudaSuccess);
}

Tensor on_host(const Tensor& tensor, Aliases& aliases) {
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    auto found = aliases.find(storage);
    if (found == aliases.end()) {
        void* at = storage->nbytes() ? cudasim_shadow(storage->data()) : nullptr;
        at::Storage host(at::Storage::use_byte_size_t(), storage->nbytes(), at::DataPtr(at, at::Device(at::kCPU)),
                         c10::GetCPUAllocator(), true);
        found = aliases.emplace(storage, std::move(host)).first;
    }
    auto made = at::detail::make_tensor<c10::TensorImpl>(at::Storage(found->second),
                                                         c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    made.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
    return made;
}

Tensor on_host(const Tensor& tensor) {
    Aliases one;
    return on_host(tensor, one);
}

void launch(c10::cuda::CUDAStream stream) {
    C10_CUDA_CHECK(static_cast<cudaError_t>(cudasim_launch(stream.stream())));
    C10_CUDA_KERNEL_LAUNCH_CHECK();
}

namespace {
struct Delivery {
    Tensor from, to;
};
void arrive(void* data) {
    std::unique_ptr<Delivery> delivery(static_cast<Delivery*>(data));
    at::AutoDispatchBelowADInplaceOrView below;
    delivery->to.copy_(delivery->from);
}
std::mutex& random_mutex = *new std::mutex;
}  // namespace

void deliver(const Tensor& to, Tensor from) {
    if (!to.numel()) return;
    auto stream = c10::cuda::getCurrentCUDAStream(to.device().index());
    auto* delivery = new Delivery{std::move(from), on_host(to)};  // no reference to `to`: who frees it waits for its stream
    if (cudasim_capturing(stream.stream())) {
        cudasim_note_write(stream.stream(), to.storage().data(), to.storage().nbytes());
        arrive(delivery);
    } else if (cudasim_asynchronous()) {
        cudasim_push(stream.stream(), arrive, delivery);
    } else {
        arrive(delivery);
    }
}

Tensor on_device(const Tensor& values, c10::Device device) {
    if (!values.defined() || values.is_cuda()) return values;
    TORCH_CHECK(values.layout() == at::kStrided && !values.is_quantized(), "cudasim: only dense results are simulated");
    Tensor dense = values.is_non_overlapping_and_dense() ? values : values.contiguous();
    Tensor made = at::detail::empty_strided_cuda(dense.sizes(), dense.strides(), dense.scalar_type(), device);
    if (values.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
    deliver(made, dense);
    return made;
}

void Recorded::writes(const Tensor& tensor) {
    at.push_back(const_cast<void*>(tensor.storage().data()));
    bytes.push_back(tensor.storage().nbytes());
}

void Recorded::to(c10::cuda::CUDAStream stream) && {
    auto* replayed = new std::function<void()>(std::move(replay));
    auto run = [](void* data) {
        at::AutoDispatchBelowADInplaceOrView below;
        (*static_cast<std::function<void()>*>(data))();
    };
    auto drop = [](void* data) { delete static_cast<std::function<void()>*>(data); };
    cudasim_record(stream.stream(), run, replayed, drop, at.data(), bytes.data(), at.size());
}

// Random numbers

Randomness::Place Randomness::next(const c10::optional<at::Generator>& given, c10::Device device) {
    bool ours = given && given->defined() && given->device().is_cuda();
    auto generator = ours ? *given : at::cuda::detail::getDefaultCUDAGenerator(device.index());
    std::lock_guard<std::mutex> guard(generator.mutex());
    auto state = at::check_generator<at::CUDAGeneratorImpl>(generator)->philox_cuda_state(4);
    Place place;
    place.captured = state.captured_;
    if (state.captured_) {
        place.seed_at = static_cast<const int64_t*>(cudasim_shadow(state.seed_.ptr));
        place.offset_at = static_cast<const int64_t*>(cudasim_shadow(state.offset_.ptr));
        place.offset = state.offset_intragraph_;
    } else {
        place.seed = state.seed_.val;
        place.offset = state.offset_.val;
    }
    return place;
}

uint64_t Randomness::Place::number() const {
    uint64_t from = captured ? static_cast<uint64_t>(*seed_at) : seed;
    uint64_t at = captured ? static_cast<uint64_t>(*offset_at) + offset : offset;
    return (from ^ 0x9E3779B97F4A7C15ULL) * 0xBF58476D1CE4E5B9ULL + at * 0x94D049BB133111EBULL;
}

Randomness::Randomness(uint64_t number) : guard_(random_mutex) {
    std::lock_guard<std::mutex> guard(host_.mutex());
    saved_ = host_.get_state();
    host_.set_current_seed(number);
}

Randomness::~Randomness() {
    std::lock_guard<std::mutex> guard(host_.mutex());
    host_.set_state(saved_);
}
}  // namespace operators
