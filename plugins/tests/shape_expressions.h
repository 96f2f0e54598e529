#pragma once

#include <NvInferRuntime.h>

#include <algorithm>
#include <cstdint>
#include <deque>

namespace bpkv::test {

/// A number, in place of an expression of TensorRT's builder.
class Number : public nvinfer1::IDimensionExpr {
public:
    explicit Number(std::int64_t value) : value_(value) { mImpl = &value_; }
    std::int64_t value() const { return value_.value; }

private:
    struct Value final : nvinfer1::apiv::VDimensionExpr {
        explicit Value(std::int64_t given) : value(given) {}
        bool isConstant() const noexcept override { return true; }
        std::int64_t getConstantValue() const noexcept override { return value; }
        bool isSizeTensor() const noexcept override { return false; }
        std::int64_t const value;
    };

    Value value_;
};

inline std::int64_t value_of(nvinfer1::IDimensionExpr const* expression) {
    return static_cast<Number const*>(expression)->value();
}

/// Evaluates at once. It owns the numbers.
class Calculator : public nvinfer1::IExprBuilder {
public:
    Calculator() { mImpl = &builder_; }
    nvinfer1::IDimensionExpr const* number(std::int64_t value) { return builder_.constant(value); }

private:
    struct Builder final : nvinfer1::apiv::VExprBuilder {
        nvinfer1::IDimensionExpr const* constant(std::int64_t value) override { return &numbers.emplace_back(value); }
        nvinfer1::IDimensionExpr const* operation(nvinfer1::DimensionOperation what, nvinfer1::IDimensionExpr const& a,
                                                  nvinfer1::IDimensionExpr const& b) override {
            auto const x = value_of(&a), y = value_of(&b);
            switch (what) {
                case nvinfer1::DimensionOperation::kPROD: return constant(x * y);
                case nvinfer1::DimensionOperation::kMIN: return constant(std::min(x, y));
                default: return nullptr;
            }
        }
        nvinfer1::IDimensionExpr const* declareSizeTensor(std::int32_t, nvinfer1::IDimensionExpr const&,
                                                          nvinfer1::IDimensionExpr const&) override {
            return nullptr;
        }
        std::deque<Number> numbers;
    };

    Builder builder_;
};

}  // namespace bpkv::test
