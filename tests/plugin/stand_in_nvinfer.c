/* What TensorRT's Python bindings ask of libnvinfer, libnvinfer_plugin and libnvonnxparser and NVIDIA's dispatch
 * library, which has the registry, lacks: a builder and a parser. Nothing here is ever called. */
#include <stddef.h>
#include <stdint.h>

void *createInferBuilder_INTERNAL(void *logger, int32_t version) { return NULL; }
void *getBuilderPluginRegistry(int32_t capability) { return NULL; }
int initLibNvInferPlugins(void *logger, char const *name_space) { return 1; }
void *createNvOnnxParser_INTERNAL(void *network, void *logger, int version) { return NULL; }
void *createNvOnnxParserRefitter_INTERNAL(void *refitter, void *logger, int32_t version) { return NULL; }
int getNvOnnxParserVersion(void) { return 0; }
