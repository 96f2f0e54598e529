// Plays a profiler: what a process tells NVTX is written down, and read by a test of the same process, or of another
// one in the file that STAND_IN_NVTX_FILE names.

#include <nvtx3/nvToolsExt.h>

#include <cstdlib>
#include <fstream>
#include <mutex>
#include <string>

#define STAND_IN_API extern "C" __attribute__((visibility("default")))

namespace {

std::mutex mutex;
std::string events;

void write(std::string const& event) {
    std::lock_guard const lock(mutex);
    events += event + "\n";
    if (char const* const path = std::getenv("STAND_IN_NVTX_FILE")) std::ofstream(path, std::ios::app) << event + "\n";
}

std::string name_of(nvtxDomainHandle_t domain) { return reinterpret_cast<char const*>(domain); }

nvtxDomainHandle_t create(char const* name) {
    write(std::string("create ") + name);
    return reinterpret_cast<nvtxDomainHandle_t>(const_cast<char*>(name));
}

nvtxStringHandle_t keep(nvtxDomainHandle_t, char const* text) {
    return reinterpret_cast<nvtxStringHandle_t>(new std::string(text));  // for as long as the process lives
}

std::string message_of(nvtxEventAttributes_t const& event) {
    if (event.messageType == NVTX_MESSAGE_TYPE_ASCII) return event.message.ascii;
    if (event.messageType != NVTX_MESSAGE_TYPE_REGISTERED) return "?";
    return *reinterpret_cast<std::string const*>(event.message.registered);
}

std::string payload_of(nvtxEventAttributes_t const& event) {
    if (event.payloadType == NVTX_PAYLOAD_UNKNOWN) return "none";
    return event.payloadType == NVTX_PAYLOAD_TYPE_INT64 ? std::to_string(event.payload.llValue) : "?";
}

int push(nvtxDomainHandle_t domain, nvtxEventAttributes_t const* event) {
    bool const known = event->version == NVTX_VERSION && event->size == NVTX_EVENT_ATTRIB_STRUCT_SIZE;
    write(known ? name_of(domain) + " push " + message_of(*event) + " " + payload_of(*event) : "?");
    return 0;
}

int pop(nvtxDomainHandle_t domain) {
    write(name_of(domain) + " pop");
    return 0;
}

template <typename Function>
void set(NvtxFunctionTable table, int place, Function* function) {
    *table[place] = reinterpret_cast<NvtxFunctionPointer>(function);
}

}  // namespace

/// Called by NVTX itself, in the library that NVTX_INJECTION64_PATH names.
STAND_IN_API int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get_table) {
    auto const* const callbacks = static_cast<NvtxExportTableCallbacks const*>(get_table(NVTX_ETID_CALLBACKS));
    NvtxFunctionTable table = nullptr;
    unsigned size = 0;
    if (callbacks == nullptr || !callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size)) return 0;
    set(table, NVTX_CBID_CORE2_DomainCreateA, create);
    set(table, NVTX_CBID_CORE2_DomainRegisterStringA, keep);
    set(table, NVTX_CBID_CORE2_DomainRangePushEx, push);
    set(table, NVTX_CBID_CORE2_DomainRangePop, pop);
    return 1;
}

STAND_IN_API char const* stand_in_nvtx_events() { return events.c_str(); }
