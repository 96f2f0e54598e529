#include "geometry.h"

#include "refusal.h"

namespace bpkv {

namespace {

template <typename Value>
void expect_equal(char const* name, Value const& kernels, Value const& layer) {
    if (kernels == layer) return;
    throw Refusal("the kernels are compiled for ", name, " ", kernels, " and the layer has ", layer,
                  "; compile kernels for this model, and build the engine with them.");
}

}  // namespace

void expect_equal(Geometry const& kernels, Geometry const& layer) {
    expect_equal("query_heads", kernels.query_heads, layer.query_heads);
    expect_equal("kv_heads", kernels.kv_heads, layer.kv_heads);
    expect_equal("head_dim", kernels.head_dim, layer.head_dim);
    expect_equal("tokens_per_block", kernels.tokens_per_block, layer.tokens_per_block);
    expect_equal("top_k", kernels.top_k, layer.top_k);
    expect_equal<std::string_view>("cache", name_of(kernels.cache), name_of(layer.cache));
    expect_equal<std::string_view>("activations", name_of(kernels.activations), name_of(layer.activations));
}

}  // namespace bpkv
