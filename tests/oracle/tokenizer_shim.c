// SPDX-License-Identifier: Apache-2.0
// What ids does llama.cpp's own tokenizer give a text? A C shim, so that the Python side never has to guess the
// layout of llama.h's by-value structs: tokenizer_ids.py compiles it against the header it is given.

#include "llama.h"

#include <stdint.h>

static void drop_log(enum ggml_log_level level, const char *text, void *user) {
    (void)level;
    (void)text;
    (void)user;
}

// Loads only the vocabulary of the GGUF at `path`; NULL when it cannot be read. Never freed: one per process.
struct llama_model *oracle_open(const char *path) {
    llama_log_set(drop_log, 0);
    llama_backend_init();
    struct llama_model_params params = llama_model_default_params();
    params.vocab_only = true;
    return llama_model_load_from_file(path, params);
}

// Writes at most `ids_max` ids and returns how many; a negative answer -n means that n would have been needed.
// No BOS or EOS is added.
int32_t oracle_ids(const struct llama_model *model, const char *text, int32_t text_bytes, bool parse_special,
                   int32_t *ids, int32_t ids_max) {
    return llama_tokenize(llama_model_get_vocab(model), text, text_bytes, ids, ids_max, false, parse_special);
}
