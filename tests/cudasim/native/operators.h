// PyTorch's operators on the simulated device: tensors whose bytes are the device's, and how results come there.
#pragma once
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/EmptyTensor.h>
#include <ATen/native/Copy.h>
#include <c10/core/CPUAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

// The simulated runtime's side, see the C++ files of the same concern.
extern "C" {
void* cudasim_shadow(const void* address);
int cudasim_access(const void* address, size_t bytes, int device);
int cudasim_asynchronous();
int cudasim_launch(void* stream);
void cudasim_drain(void* stream);
void cudasim_drain_all();
void cudasim_push(void* stream, void (*run)(void*), void* data);
int cudasim_capturing(void* stream);
void cudasim_note_write(void* stream, const void* address, size_t bytes);
void cudasim_record(void* stream, void (*run)(void*), void* data, void (*drop)(void*), void* const* at, const size_t* bytes,
                    size_t count);
}

namespace operators {
using at::Tensor;

/// Storages of the host that alias those of the device, for one call; views of one storage stay views of one storage.
using Aliases = std::unordered_map<void*, at::Storage>;

/// The device memory that a tensor's storage has, checked as a kernel on that device would find it.
void check_access(const Tensor& tensor, c10::Device device);
/// The tensor's bytes as a CPU tensor. It owns nothing: device memory is the caching allocator's.
Tensor on_host(const Tensor& tensor, Aliases& aliases);
Tensor on_host(const Tensor& tensor);

/// On the tensor's current stream, after what is queued there and late: the values of a CPU tensor become its own.
void deliver(const Tensor& to, Tensor from);
/// A new device tensor with these values, delivered.
Tensor on_device(const Tensor& values, c10::Device device);

/// Launch a kernel: counted, in stream order, and an error that an earlier call left in this thread is reported.
void launch(c10::cuda::CUDAStream stream);

/// What a captured operation does at a replay, and which device memory it writes to then.
struct Recorded {
    std::function<void()> replay;
    std::vector<void*> at;
    std::vector<size_t> bytes;
    void writes(const Tensor& tensor);
    void to(c10::cuda::CUDAStream stream) &&;
};

/// While it lives, random numbers drawn on the host continue a CUDA generator's sequence.
class Randomness {
public:
    /// The place in the sequence that a launch takes; a captured one's is read from the device at its replay.
    struct Place {
        bool captured = false;
        uint64_t seed = 0, offset = 0;
        const int64_t *seed_at = nullptr, *offset_at = nullptr;
        uint64_t number() const;
    };
    static Place next(const c10::optional<at::Generator>& generator, c10::Device device);
    /// For operators that take no generator: the host's default one is borrowed and put back.
    explicit Randomness(uint64_t number);
    ~Randomness();

private:
    at::Generator host_ = at::detail::getDefaultCPUGenerator();
    Tensor saved_;
    std::lock_guard<std::mutex> guard_;
};

void install_recurrent(torch::Library& library);
}  // namespace operators
