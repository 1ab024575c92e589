// The kernels ONNX Runtime creates, one object per node.
#ifndef ENGINEBAY_ADAPTERS_ORT_OPS_H
#define ENGINEBAY_ADAPTERS_ORT_OPS_H

#include "enginebay/elementwise.h"
#include "enginebay/layer_tail.h"
#include "enginebay/moe.h"
#include "enginebay/paged_attention.h"
#include "enginebay/quant_linear.h"
#include "enginebay/spec_verify.h"
#include "ort.h"

namespace enginebay::ort {

// The op table's names, in the order of their codes.
constexpr const char* kActivations[] = {"silu", "gelu", "gelu_tanh", "relu", "relu2"};
constexpr eb_activation kActivationCodes[] = {EB_SILU, EB_GELU, EB_GELU_TANH, EB_RELU, EB_RELU2};
constexpr const char* kFormats[] = {"f32", "f16", "bf16", "f8", "i8", "i4"};
constexpr eb_dtype kFormatTypes[] = {EB_F32, EB_F16, EB_BF16, EB_F8E4M3, EB_I8, EB_I4};

class PagedAttention {
 public:
  static constexpr const char* kName = "PagedAttention";
  static constexpr size_t kInputCount = 16, kRequiredInputs = 7;
  static constexpr Type kInputs[kInputCount] = {kIo,    kAny,   kInt32, kInt32, kInt32, kInt32,
                                                kInt32, kFloat, kFloat, kFloat, kFloat, kFloat,
                                                kFloat, kInt8,  kUint8, kFloat};
  static constexpr Type kOutputs[] = {kIo, kAny};

  explicit PagedAttention(const OrtKernelInfo* info);
  OrtStatus* ComputeV2(OrtKernelContext* context) noexcept;

 private:
  OrtStatus* check_shapes(const Tensor (&in)[kInputCount]) const;

  std::string node_;
  eb_paged_attention_desc desc_{};
};

// Throws where the graph says, in this attribute, that weights are in another layout than this library's.
void check_layout(const Attributes& attributes, const eb_quant_linear_desc& desc,
                  const char* attribute = "layout");

// The attributes and the packed weights that QuantLinear and Embedding have in common.
class PackedWeights {
 protected:
  PackedWeights(const char* op, const OrtKernelInfo* info);
  // The weight input, once its size is known to be what the attributes need.
  OrtStatus* weights(Call& call, Tensor* tensor) const;

  std::string node_;
  eb_quant_linear_desc desc_{};
  size_t bytes_ = 0;
};

class QuantLinear : PackedWeights {
 public:
  static constexpr const char* kName = "QuantLinear";
  static constexpr size_t kRequiredInputs = 2;
  static constexpr Type kInputs[] = {kIo, kUint8, kFloat};
  static constexpr Type kOutputs[] = {kIo};

  explicit QuantLinear(const OrtKernelInfo* info) : PackedWeights(kName, info) {}
  OrtStatus* ComputeV2(OrtKernelContext* context) noexcept;
};

class QuantLinearF8Inputs : PackedWeights {
 public:
  static constexpr const char* kName = "QuantLinearF8Inputs";
  static constexpr size_t kRequiredInputs = 2;
  static constexpr Type kInputs[] = {kIo, kUint8, kFloat, kInt32};
  static constexpr Type kOutputs[] = {kIo};

  explicit QuantLinearF8Inputs(const OrtKernelInfo* info);
  OrtStatus* ComputeV2(OrtKernelContext* context) noexcept;

 private:
  float input_scale_;
};

class Embedding : PackedWeights {
 public:
  static constexpr const char* kName = "Embedding";
  static constexpr size_t kRequiredInputs = 2;
  static constexpr Type kInputs[] = {kInt32, kUint8};
  static constexpr Type kOutputs[] = {kIo};

  explicit Embedding(const OrtKernelInfo* info) : PackedWeights(kName, info) {}
  OrtStatus* ComputeV2(OrtKernelContext* context) noexcept;
};

class AddRmsNorm {
 public:
  static constexpr const char* kName = "AddRMSNorm";
  static constexpr size_t kRequiredInputs = 3;
  static constexpr Type kInputs[] = {kIo, kIo, kFloat};
  static constexpr Type kOutputs[] = {kIo, kIo};

  explicit AddRmsNorm(const OrtKernelInfo* info);
  OrtStatus* ComputeV2(OrtKernelContext* context) noexcept;

 private:
  std::string node_;
  float epsilon_;
  eb_dtype io_;
};

class GatedActivation {
 public:
  static constexpr const char* kName = "GatedActivation";
  static constexpr size_t kRequiredInputs = 1;
  static constexpr Type kInputs[] = {kIo};
  static constexpr Type kOutputs[] = {kIo};

  explicit GatedActivation(const OrtKernelInfo* info);
  OrtStatus* ComputeV2(OrtKernelContext* context) noexcept;

 private:
  std::string node_;
  eb_activation activation_;
  eb_dtype io_;
};

class LayerTail {
 public:
  static constexpr const char* kName = "LayerTail";
  static constexpr size_t kRequiredInputs = 8;
  static constexpr Type kInputs[] = {kIo,    kIo,    kFloat, kFloat, kUint8, kUint8,
                                     kUint8, kUint8, kFloat, kFloat, kFloat, kFloat};
  static constexpr Type kOutputs[] = {kIo, kIo};

  explicit LayerTail(const OrtKernelInfo* info);
  OrtStatus* ComputeV2(OrtKernelContext* context) noexcept;

 private:
  std::string node_;
  eb_layer_tail_desc desc_{};
  size_t bytes_[EB_TAIL_PRODUCTS] = {};
};

class QuantMoe {
 public:
  static constexpr const char* kName = "QuantMoE";
  static constexpr size_t kInputCount = 7, kRequiredInputs = 4;
  static constexpr Type kInputs[kInputCount] = {kIo, kFloat, kUint8, kUint8, kFloat, kFloat, kFloat};
  static constexpr Type kOutputs[] = {kIo};

  explicit QuantMoe(const OrtKernelInfo* info);
  OrtStatus* ComputeV2(OrtKernelContext* context) noexcept;

 private:
  OrtStatus* check_shapes(const Tensor (&in)[kInputCount]) const;

  std::string node_;
  eb_moe_desc desc_{};
  size_t gate_up_stride_ = 0, down_stride_ = 0;  // bytes of an expert
};

class SpecVerify {
 public:
  static constexpr const char* kName = "SpecVerify";
  static constexpr size_t kRequiredInputs = 3;
  static constexpr Type kInputs[] = {kIo,    kInt32, kInt32, kInt32, kFloat, kFloat,
                                     kInt32, kFloat, kFloat, kInt64, kInt64};
  static constexpr Type kOutputs[] = {kInt32, kInt32, kInt32};

  explicit SpecVerify(const OrtKernelInfo* info);
  OrtStatus* ComputeV2(OrtKernelContext* context) noexcept;

 private:
  std::string node_;
  int32_t max_depth_;
  eb_dtype io_;
};

class Sample {
 public:
  static constexpr const char* kName = "Sample";
  static constexpr size_t kRequiredInputs = 1;
  static constexpr Type kInputs[] = {kIo, kFloat, kInt32, kFloat, kFloat, kInt64, kInt64};
  static constexpr Type kOutputs[] = {kInt32};

  explicit Sample(const OrtKernelInfo* info);
  OrtStatus* ComputeV2(OrtKernelContext* context) noexcept;

 private:
  std::string node_;
  eb_dtype io_;
};

}  // namespace enginebay::ort
#endif
