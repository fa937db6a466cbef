// One run of Helldez/BigMoeOnEdge in a fresh process: load, prefill, greedy decode. JSON in, JSON out, as
// `run_third.py` says. Theirs are the parts that stream experts, put together as their session does; that
// takes text alone, and these models have no tokenizer.
//
// Settings: cache_mib (0: what the budget leaves beside the other weights and reserve_mib), lanes (reads at
// once), overlap (needs a llama.cpp with their hook), prefetch_layers, micro_batch.
//
// To build it, B being BigMoeOnEdge's folder, L llama.cpp's sources (`vendor/llama.cpp` in llama-cpp-python's
// source package) and D the folder of llama-cpp-python's libraries of the same release:
//
//     g++ -std=c++17 -O3 -DNDEBUG -DBMOE_HAVE_LLAMA=1 -IB/core/include -IB/core/src -IL/include -IL/ggml/include
//         -IL/vendor tests/benchmarks/lib/run_bigmoe.cc B/core/src/config.cpp B/core/src/io/*.cpp
//         B/core/src/moe/*.cpp -LD -lllama -lggml -lggml-cpu -lggml-base -Wl,-rpath,D -lpthread -o bigmoe
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "ggml.h"
#include "llama.h"
#include "moe/dense_weights.h"
#include "moe/expert_stream_source.h"
#include "moe/gguf_offsets.h"
#include "moe/router_hook.h"
#include "nlohmann/json.hpp"

namespace {

using Json = nlohmann::json;
constexpr uint64_t kMib = 1 << 20;

[[noreturn]] void fail(const std::string& reason) {
  std::cerr << reason << "\n";
  std::exit(1);
}

// Seconds of CLOCK_MONOTONIC, which Python's time.monotonic counts too.
double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

int peak_memory_kib() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("VmHWM:", 0) == 0) return std::stoi(line.substr(6));
  }
  fail("no VmHWM in /proc/self/status");
}

class Engine {
 public:
  explicit Engine(const Json& spec) : spec_(spec) {
    llama_backend_init();
    load();
    stream_experts();
  }

  ~Engine() {
    source_.shutdown();
    llama_free(context_);
    llama_model_free(model_);
  }

  // Append `tokens` and return the likeliest next one. Their hook wants to know if this is decoding.
  llama_token forward(std::vector<llama_token> tokens, bool decoding) {
    hook_->set_batch_phase(decoding ? 1 : 0);
    const llama_batch batch = llama_batch_get_one(tokens.data(), static_cast<int32_t>(tokens.size()));
    if (llama_decode(context_, batch) != 0 || source_.fatal()) fail("llama_decode failed");
    const float* logits = llama_get_logits_ith(context_, -1);
    return static_cast<llama_token>(std::max_element(logits, logits + vocabulary_) - logits);
  }

  void clear() { llama_memory_clear(llama_get_memory(context_), true); }

  bmoe::IExpertSource::Stats stats() const { return source_.stats(); }
  uint64_t cache_mib() const { return cache_mib_; }

 private:
  void load() {
    llama_model_params model = llama_model_default_params();
    model.load_mode = LLAMA_LOAD_MODE_MMAP;
    model.use_extra_bufts = false;
    model.n_gpu_layers = 0;
    model_ = llama_model_load_from_file(spec_.at("model").get<std::string>().c_str(), model);
    if (model_ == nullptr) fail("llama.cpp couldn't load the model");
    vocabulary_ = llama_vocab_n_tokens(llama_model_get_vocab(model_));
    char arch[128] = {};
    llama_model_meta_val_str(model_, "general.architecture", arch, sizeof(arch));
    recipe_ = bmoe::find_moe_recipe(arch);
    if (recipe_ == nullptr) fail(std::string("no recipe for ") + arch);
    hook_ = std::make_unique<bmoe::RouterHook>(*recipe_, llama_model_n_layer(model_));
    hook_->set_prefetch_layers(spec_.value("prefetch_layers", 0));

    llama_context_params params = llama_context_default_params();
    params.n_ctx = spec_.at("context");
    params.n_batch = params.n_ctx;
    params.n_ubatch = spec_.value("micro_batch", 64);
    params.n_threads = params.n_threads_batch = spec_.at("threads");
    params.type_k = params.type_v = GGML_TYPE_Q8_0;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    params.cb_eval = &bmoe::RouterHook::c_eval;
    params.cb_eval_user_data = hook_.get();
    context_ = llama_init_from_model(model_, params);
    if (context_ == nullptr) fail("llama.cpp couldn't make a context");
  }

  // One token from the mapped file shows the tensors of experts; from then on these are read.
  void stream_experts() {
    hook_->begin_capture();
    llama_token first = spec_.at("prompt").at(0);
    if (llama_decode(context_, llama_batch_get_one(&first, 1)) != 0) fail("the first token failed");
    hook_->end_capture();

    const bmoe::GgufMeta meta = bmoe::read_gguf_meta(spec_.at("model").get<std::string>().c_str());
    if (!meta.ok) fail("no offsets in the model");
    const bmoe::GgufOffsets& offsets = meta.offsets;
    std::vector<bmoe::LayerExperts> layers = hook_->captured();
    std::set<std::string> experts;
    int count = 0;
    for (bmoe::LayerExperts& layer : layers) {
      for (bmoe::ExpertTensorRef& matrix : layer.proj) {
        if (!layer.bound || matrix.tensor == nullptr) continue;
        const std::string name = matrix.tensor->name;
        matrix.file_off = offsets.off_by_name.at(name);
        matrix.file_idx = offsets.file_by_name.at(name);
        count = static_cast<int>(matrix.tensor->ne[2]);
        experts.insert(name);
      }
    }
    if (experts.empty()) fail("no experts were found");

    std::vector<bmoe::DenseTensorRef> others;
    uint64_t other_bytes = 0;
    for (const auto& [name, tensor] : hook_->captured_weights()) {
      if (experts.count(name) != 0 || offsets.off_by_name.count(name) == 0) continue;
      bmoe::DenseTensorRef other;
      other.tensor = tensor;
      other.file_off = offsets.off_by_name.at(name);
      other.size = offsets.size_by_name.at(name);
      other.file_idx = offsets.file_by_name.at(name);
      other_bytes += other.size;
      others.push_back(other);
    }
    source_.set_dense_tensors(std::move(others));

    bmoe::MoeStreamConfig config;
    config.enabled = true;
    config.io_threads = spec_.value("lanes", 4);
    config.overlap = spec_.value("overlap", false);
    config.prefetch_layers = spec_.value("prefetch_layers", 0);
    config.cache_mb = static_cast<int>(cache_mib_ = cache(other_bytes / kMib));
    if (!source_.init(offsets.shard_paths, count, std::move(layers), config))
      fail("their source didn't start");
    hook_->set_source(&source_);
    if (config.overlap) start_overlap();
    clear();
  }

  uint64_t cache(uint64_t other_mib) const {
    if (const uint64_t asked = spec_.value("cache_mib", 0); asked != 0) return asked;
    const uint64_t budget = spec_.at("budget_bytes").get<uint64_t>() / kMib;
    const uint64_t kept = other_mib + spec_.value("reserve_mib", 400);
    if (budget <= kept) fail("the budget leaves nothing for experts");
    return budget - kept;
  }

  void start_overlap() {
#ifdef BMOE_HAVE_EXPERT_READY_HOOK
    source_.enable_overlap_hook();
#else
    fail("overlap needs a llama.cpp with the hook");
#endif
  }

  const Json& spec_;
  llama_model* model_ = nullptr;
  llama_context* context_ = nullptr;
  const bmoe::MoeRecipe* recipe_ = nullptr;
  std::unique_ptr<bmoe::RouterHook> hook_;
  bmoe::ExpertStreamSource source_;
  int vocabulary_ = 0;
  uint64_t cache_mib_ = 0;
};

Json run(const Json& spec) {
  const double started = now();
  Engine engine(spec);
  const double loaded = now();
  const std::vector<llama_token> prompt = spec.at("prompt");
  const size_t wanted = spec.at("max_tokens"), left_out = spec.at("steady_tokens");
  if (spec.at("warm_up") != 0) {
    engine.forward(spec.at("warm_prompt"), false);
    engine.clear();
  }
  const double begin = now();
  std::vector<llama_token> text{engine.forward(prompt, false)};
  std::vector<double> times{now()};
  auto before = engine.stats();
  while (text.size() < wanted) {
    text.push_back(engine.forward({text.back()}, true));
    times.push_back(now());
    if (times.size() == left_out) before = engine.stats();
  }
  const auto after = engine.stats();
  const size_t steady = times.size() > left_out ? times.size() - left_out : 0;
  const double rate = steady != 0 ? steady / (times.back() - times[left_out - 1]) : 0.0;
  return {
      {"load_seconds", loaded - started},
      {"first_token_at", times.front()},
      {"prefill_tokens_per_second", prompt.size() / (times.front() - begin)},
      {"decode_tokens_per_second", rate},
      {"text", text},
      {"peak_memory_bytes", int64_t{1024} * peak_memory_kib()},
      {"cache_mib", engine.cache_mib()},
      {"steady",
       {{"flash_bytes_read", after.read_bytes - before.read_bytes},
        {"hits", after.cache_hits - before.cache_hits},
        {"lookups", after.cache_lookups - before.cache_lookups},
        {"read_seconds", after.read_seconds - before.read_seconds},
        {"managed_seconds", after.mgmt_seconds - before.mgmt_seconds},
        {"waited_seconds", (after.stall_seconds - before.stall_seconds) / spec.at("threads").get<int>()}}},
  };
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) fail("one argument: the spec as JSON");
  llama_log_set([](ggml_log_level, const char* text, void*) { std::fputs(text, stderr); }, nullptr);
  std::cout << run(Json::parse(argv[1])).dump() << std::endl;
  return 0;
}
