// Cells of LSTM and GRU, whose fused kernels exist on CUDA only: the same mathematics by operators that both have.
//
// Layouts are those of PyTorch's kernels: gates in the order i, f, g, o (LSTM) and r, z, n (GRU); the workspace is ours.
#include "operators.h"

namespace operators {
namespace {
using OptionalTensor = c10::optional<Tensor>;

bool has(const OptionalTensor& tensor) { return tensor && tensor->defined(); }

std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& c,
                                             const OptionalTensor& input_bias, const OptionalTensor& hidden_bias) {
    Tensor gates = input_gates + hidden_gates;
    if (has(input_bias)) gates = gates + *input_bias + *hidden_bias;
    auto part = gates.chunk(4, 1);
    Tensor i = part[0].sigmoid(), f = part[1].sigmoid(), g = part[2].tanh(), o = part[3].sigmoid();
    Tensor next = f * c + i * g;
    return {o * next.tanh(), next, at::cat({i, f, g, o}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const OptionalTensor& grad_h, const OptionalTensor& grad_c, const Tensor& c,
                                                      const Tensor& next, const Tensor& workspace, bool has_bias) {
    auto part = workspace.chunk(4, 1);
    const Tensor &i = part[0], &f = part[1], &g = part[2], &o = part[3];
    Tensor squashed = next.tanh();
    Tensor dh = has(grad_h) ? *grad_h : at::zeros_like(next);
    Tensor dc = dh * o * (1 - squashed * squashed);
    if (has(grad_c)) dc = dc + *grad_c;
    Tensor gates = at::cat({dc * g * i * (1 - i), dc * c * f * (1 - f), dc * i * (1 - g * g), dh * squashed * o * (1 - o)}, 1);
    return {gates, dc * f, has_bias ? gates.sum(0) : Tensor()};
}

std::tuple<Tensor, Tensor> gru_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& h,
                                    const OptionalTensor& input_bias, const OptionalTensor& hidden_bias) {
    bool biased = has(input_bias);
    auto in = (biased ? input_gates + *input_bias : input_gates).chunk(3, 1);
    auto hidden = (biased ? hidden_gates + *hidden_bias : hidden_gates).chunk(3, 1);
    Tensor r = (in[0] + hidden[0]).sigmoid(), z = (in[1] + hidden[1]).sigmoid(), n = (in[2] + r * hidden[2]).tanh();
    return {(h - n) * z + n, at::cat({r, z, n, h, hidden[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& grad, const Tensor& workspace, bool has_bias) {
    auto part = workspace.chunk(5, 1);
    const Tensor &r = part[0], &z = part[1], &n = part[2], &h = part[3], &hidden_n = part[4];
    Tensor dz = grad * (h - n) * z * (1 - z), dn = grad * (1 - z) * (1 - n * n), dr = dn * hidden_n * r * (1 - r);
    Tensor input = at::cat({dr, dz, dn}, 1), hidden = at::cat({dr, dz, dn * r}, 1);
    return {input, hidden, grad * z, has_bias ? input.sum(0) : Tensor(), has_bias ? hidden.sum(0) : Tensor()};
}
}  // namespace

void install_recurrent(torch::Library& library) {
    library.impl("_thnn_fused_lstm_cell", lstm_cell);
    library.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
    library.impl("_thnn_fused_gru_cell", gru_cell);
    library.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
}
}  // namespace operators
