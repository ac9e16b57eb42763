// Runs the operators of the CUDA dispatch key on the CPU, over tensors that alias the device's memory.
//
// What allocates, copies or waits stays PyTorch's own and reaches the simulated runtime, so the caching allocator, pinned
// memory, streams, events and autograd's device threads are the real ones.
#include "operators.h"
#include <set>

namespace operators {
namespace {
using c10::IValue;
using torch::jit::Stack;

/// Operators that take index or length tensors of the host beside tensors of the device, as the real ones do.
bool takes_host_tensors(const std::string& name) {
    for (const char* part : {"index", "_foreach", "pack", "_fused_", "_amp_", "copy"})
        if (name.find(part) != std::string::npos) return true;
    return false;
}

/// One call: its arguments as the CPU kernel gets them, and what has to be done with what it wrote.
class Invocation {
public:
    Invocation(const c10::OperatorHandle& op, Stack* stack) : op_(op), schema_(op.schema()), stack_(stack) {
        size_t n = schema_.arguments().size();
        given_.assign(stack->end() - n, stack->end());
        torch::jit::drop(*stack, n);
        for (auto& value : given_) look(value);
        if (!device_) device_ = c10::Device(c10::kCUDA, c10::cuda::current_device());
    }

    void run() {
        c10::cuda::CUDAGuard on(*device_);
        auto stream = c10::cuda::getCurrentCUDAStream(device_->index());
        capturing_ = cudasim_capturing(stream.stream());
        if (waits()) C10_CUDA_CHECK(cudaStreamSynchronize(stream.stream()));
        check();
        cudasim_drain(stream.stream());  // operations of a stream happen in order
        place_arguments();
        std::vector<IValue> arguments(stack_->end() - given_.size(), stack_->end());
        call(*stack_);
        settle();
        launch(stream);
        hand_back();
        if (capturing_) record(stream, std::move(arguments));
    }

private:
    void look(const IValue& value) {
        auto note = [this](const Tensor& tensor) {
            if (!tensor.defined()) return;
            if (!tensor.is_cuda()) {
                host_tensor_ |= tensor.dim() > 0 && tensor.device().is_cpu();
            } else if (!device_) {
                device_ = tensor.device();
            } else {
                mixed_ |= *device_ != tensor.device();
            }
        };
        if (value.isTensor()) note(value.toTensor());
        else if (value.isTensorList()) for (const Tensor& tensor : value.toTensorList()) note(tensor);
        else if (value.isDevice() && value.toDevice().is_cuda() && !device_) device_ = value.toDevice();
    }

    /// What gives the host a number or a shape that depends on values waits for them.
    bool waits() const {
        if (op_.hasTag(at::Tag::dynamic_output_shape) || op_.hasTag(at::Tag::data_dependent_output)) return true;
        for (const auto& result : schema_.returns()) {
            auto kind = result.type()->kind();
            if (kind == c10::TypeKind::BoolType || kind == c10::TypeKind::IntType || kind == c10::TypeKind::FloatType) return true;
        }
        return false;
    }

    void check() const {
        TORCH_CHECK(!mixed_, "Expected all tensors to be on the same device (", schema_.name(), ", simulated)");
        TORCH_CHECK(!host_tensor_ || takes_host_tensors(schema_.name()), "Expected all tensors to be on the same device, but ",
                    schema_.name(), " got one on cpu and one on ", *device_, " (simulated)");
    }

    Tensor argument(const Tensor& tensor, bool write) {
        if (!tensor.defined() || !tensor.is_cuda()) return tensor;
        check_access(tensor, *device_);
        Tensor made = on_host(tensor, aliases_);
        if (!write) return made;
        if (capturing_) cudasim_note_write(stream(), tensor.storage().data(), tensor.storage().nbytes());
        // What is written arrives later, so it is written somewhere else first.
        else if (cudasim_asynchronous() && made.numel()) made = at::empty_strided(made.sizes(), made.strides(), made.options()).copy_(made);
        written_.push_back({tensor, made});
        return made;
    }

    IValue argument(const IValue& value, bool write) {
        if (value.isTensor()) return argument(value.toTensor(), write);
        if (value.isDevice() && value.toDevice().is_cuda()) return c10::Device(c10::kCPU);
        if (value.isTensorList()) {
            c10::List<Tensor> made;
            for (const Tensor& tensor : value.toTensorList()) made.push_back(argument(tensor, write));
            return made;
        }
        if (value.isOptionalTensorList()) {
            c10::List<c10::optional<Tensor>> made;
            for (c10::optional<Tensor> tensor : value.toOptionalTensorList())
                made.push_back(tensor ? c10::optional<Tensor>(argument(*tensor, write)) : c10::nullopt);
            return made;
        }
        return value;
    }

    void place_arguments() {
        at::AutoDispatchBelowADInplaceOrView below;
        random_ = op_.hasTag(at::Tag::nondeterministic_seeded);
        c10::optional<at::Generator> generator;
        for (size_t i = 0; i < given_.size(); i++) {
            const auto* info = schema_.arguments()[i].alias_info();
            if (given_[i].isGenerator()) {
                generator = given_[i].toGenerator();
                stack_->emplace_back();
            } else {
                stack_->push_back(argument(given_[i], info && info->isWrite()));
            }
        }
        if (random_) place_ = Randomness::next(generator, *device_);
    }

    void call(Stack& stack) const {
        at::AutoDispatchBelowADInplaceOrView below;
        c10::optional<Randomness> randomness;
        if (random_) randomness.emplace(place_.number());
        op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    }

    /// Tensors that were written to: their size, and their bytes if those are elsewhere.
    void settle() {
        for (auto& [device, host] : written_) {
            if (device.sizes() != host.sizes() || device.strides() != host.strides()) {
                device.resize_(host.sizes());
                device.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides());
            }
            if (host.numel() && host.data_ptr() != cudasim_shadow(device.data_ptr())) deliver(device, host);
        }
    }

    /// The results on the stack become tensors of the device, or the caller's own where they were written to.
    void hand_back() {
        size_t n = schema_.returns().size();
        for (size_t i = 0; i < n; i++) {
            IValue& value = (*stack_)[stack_->size() - n + i];
            const auto* info = schema_.returns()[i].alias_info();
            if (!info) {
                value = result(value);
                continue;
            }
            for (size_t j = 0; j < given_.size(); j++) {
                const auto* of = schema_.arguments()[j].alias_info();
                if (of && of->beforeSets() == info->beforeSets()) value = given_[j];
            }
        }
    }

    IValue result(const IValue& value) {
        if (value.isTensor()) {
            results_.push_back(on_device(value.toTensor(), *device_));
            return results_.back();
        }
        if (!value.isTensorList()) return value;
        c10::List<Tensor> made;
        for (const Tensor& tensor : value.toTensorList()) {
            results_.push_back(on_device(tensor, *device_));
            made.push_back(results_.back());
        }
        return made;
    }

    /// For replays: the same call over the same addresses; its results go where this call's went.
    void record(c10::cuda::CUDAStream stream, std::vector<IValue> arguments) {
        Recorded recorded;
        for (auto& [device, host] : written_) recorded.writes(device);
        std::vector<Tensor> targets;
        for (auto& tensor : results_) {
            bool there = tensor.defined() && tensor.numel();
            if (there) recorded.writes(tensor);
            targets.push_back(there ? on_host(tensor) : Tensor());
        }
        auto once = *this;
        once.forget();
        recorded.replay = [once, arguments, targets] {
            Stack stack(arguments);
            once.call(stack);
            once.put(stack, targets);
        };
        std::move(recorded).to(stream);
    }

    void forget() {  // references that would keep memory
        given_.clear();
        written_.clear();
        results_.clear();
        aliases_.clear();
        stack_ = nullptr;
    }

    void put(const Stack& stack, const std::vector<Tensor>& targets) const {
        size_t next = 0;
        auto one = [&](const Tensor& from) {
            const Tensor& to = targets[next++];
            if (to.defined()) Tensor(to).copy_(from);
        };
        size_t n = schema_.returns().size();
        for (size_t i = 0; i < n; i++) {
            const IValue& value = stack[stack.size() - n + i];
            if (schema_.returns()[i].alias_info()) continue;
            if (value.isTensor()) one(value.toTensor());
            else if (value.isTensorList()) for (const Tensor& tensor : value.toTensorList()) one(tensor);
        }
    }

    void* stream() const { return c10::cuda::getCurrentCUDAStream(device_->index()).stream(); }

    c10::OperatorHandle op_;
    const c10::FunctionSchema& schema_;
    Stack* stack_;
    std::vector<IValue> given_;
    c10::optional<c10::Device> device_;
    bool mixed_ = false, host_tensor_ = false, random_ = false, capturing_ = false;
    Randomness::Place place_;
    Aliases aliases_;
    std::vector<std::pair<Tensor, Tensor>> written_;
    std::vector<Tensor> results_;
};

void on_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) { Invocation(op, stack).run(); }

bool one_after_the_other(const Tensor& self, const Tensor& source) {
    return self.scalar_type() == source.scalar_type() && self.is_conj() == source.is_conj() && self.is_neg() == source.is_neg() &&
           self.sizes() == source.sizes() && self.strides() == source.strides() && self.is_non_overlapping_and_dense();
}

/// Plain copies are the runtime's; one that changes the type or the layout would be a kernel.
Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
    bool kernel = self.is_cuda() && source.is_cuda() && self.numel() && !one_after_the_other(self, source);
    if (!kernel || self.device() != source.device()) {
        if (kernel) return self.copy_(source.to(self.scalar_type()).expand(self.sizes()).contiguous().to(self.device()));
        return at::native::copy_(self, source, non_blocking);
    }
    c10::cuda::CUDAGuard on(self.device());
    auto stream = c10::cuda::getCurrentCUDAStream(self.device().index());
    cudasim_drain(stream.stream());
    check_access(self, self.device());
    check_access(source, self.device());
    at::AutoDispatchBelowADInplaceOrView below;
    bool conjugate = source.is_conj() != self.is_conj(), negative = source.is_neg() != self.is_neg();
    auto values = [from = on_host(source), sizes = self.sizes().vec(), type = self.scalar_type(), conjugate, negative] {
        Tensor view = from;
        if (conjugate) view = view.conj();
        if (negative) view = view._neg_view();
        return at::empty(sizes, from.options().dtype(type)).copy_(view.expand(sizes));
    };
    deliver(self, values());
    launch(stream);
    if (cudasim_capturing(stream.stream())) {
        Recorded recorded;
        recorded.writes(self);
        recorded.replay = [values, to = on_host(self)] { Tensor(to).copy_(values()); };
        std::move(recorded).to(stream);
    }
    return self;
}

const std::set<std::string> REAL = {
    "aten::empty", "aten::empty_strided", "aten::resize_", "aten::resize", "aten::record_stream", "aten::_local_scalar_dense",
    "aten::_efficientzerotensor", "aten::is_pinned", "aten::_pin_memory", "aten::is_set_to", "aten::copy_", "aten::set_",
    "aten::_thnn_fused_lstm_cell", "aten::_thnn_fused_lstm_cell_backward_impl", "aten::_thnn_fused_gru_cell",
    "aten::_thnn_fused_gru_cell_backward"};

/// Operators that only make views of their arguments stay as they are.
bool makes_views(const c10::FunctionSchema& schema) {
    for (const auto& argument : schema.arguments())
        if (argument.alias_info() && !argument.alias_info()->isWrite()) return true;
    return false;
}

struct Silent : c10::WarningHandler {
    void process(const c10::Warning&) override {}
};

class Installed {
public:
    Installed() {
        Silent silent;  // to replace a kernel is what we are here for
        c10::WarningUtils::WarningHandlerGuard quiet(&silent);
        auto& context = at::globalContext();  // there is no stand-in for cuDNN's kernels and those of fused attention
        context.setUserEnabledCuDNN(false);
        context.setSDPUseFlash(false);
        context.setSDPUseMemEfficient(false);
        context.setSDPUseCuDNN(false);
        auto& dispatcher = c10::Dispatcher::singleton();
        auto names = dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CUDA);
        names.push_back({"aten::convolution", ""});
        names.push_back({"aten::convolution_backward", ""});
        for (auto& name : names) replace(dispatcher, name);
        library_.impl("copy_", copy_);
        install_recurrent(library_);
        atexit(cudasim_drain_all);  // what is queued refers to tensors
    }
    size_t count() const { return held_.size(); }

private:
    void replace(c10::Dispatcher& dispatcher, const c10::OperatorName& name) {
        auto op = dispatcher.findSchema(name);
        if (!op || name.name.rfind("aten::", 0) != 0 || REAL.count(name.name) || makes_views(op->schema())) return;
        if (!op->hasComputedKernelForDispatchKey(c10::DispatchKey::CPU)) return;
        held_.push_back(dispatcher.registerImpl(name, c10::DispatchKey::CUDA,
                                                c10::KernelFunction::makeFromBoxedFunction<&on_cpu>(), c10::nullopt, nullptr,
                                                "cudasim"));
    }
    std::vector<c10::RegistrationHandleRAII> held_;
    torch::Library library_{torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__};
};
}  // namespace
}  // namespace operators

/// Returns how many operators are replaced.
extern "C" size_t cudasim_install() {
    static auto& installed = *new operators::Installed;
    return installed.count();
}
