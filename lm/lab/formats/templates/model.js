// A decoder-only transformer: token ids in, raw logits out, one token at a time. The order is that
// of lm/model/transformer.py.
//
// Shapes: D d_model, H number of heads (n_kv_heads for keys and values), K head_dim, S number of
// keys, V vocabulary size. A model is { config, weights }: the weights are Float32Arrays by name, a
// matrix (out, in) row by row. Sums are in double precision, what is stored in single precision.
"use strict";

// --- weights

const HALVES = Float32Array.from({ length: 65536 }, (_, bits) => {  // the value of each float of 16 bits
  const exponent = (bits >> 10) & 31, fraction = bits & 1023;
  const size = exponent ? 2 ** (exponent - 25) * (1024 + fraction) : 2 ** -24 * fraction;
  return bits >> 15 ? -size : size;
});

function readTensor(base64, dtype) {  // little endian, in f16 or f32
  const binary = atob(base64), bytes = new Uint8Array(binary.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = binary.charCodeAt(i);
  if (dtype === "f32") return new Float32Array(bytes.buffer);
  const halves = new Uint16Array(bytes.buffer), values = new Float32Array(halves.length);
  for (let i = 0; i < values.length; i++) values[i] = HALVES[halves[i]];
  return values;
}

// --- linear layers and norms

function product(weight, x, bias) {  // (out, in) and (in,) -> (out,)
  const width = x.length, y = new Float32Array(weight.length / width);
  for (let row = 0, at = 0; row < y.length; row++) {
    let a = 0, b = 0, c = 0, d = 0, i = 0;  // four sums, which do not wait for each other
    for (; i + 3 < width; i += 4, at += 4) {
      a += weight[at] * x[i];
      b += weight[at + 1] * x[i + 1];
      c += weight[at + 2] * x[i + 2];
      d += weight[at + 3] * x[i + 3];
    }
    for (; i < width; i++, at++) a += weight[at] * x[i];
    y[row] = a + b + c + d + (bias ? bias[row] : 0);
  }
  return y;
}

function linear({ weights }, name, x) {  // (in,) -> (out,)
  return product(weights[`${name}.weight`], x, weights[`${name}.bias`]);
}

function norm({ config, weights }, name, x) {  // (n, width) -> the same shape, each row by itself
  if (config.norm === "none") return x;
  const weight = weights[`${name}.weight`], bias = weights[`${name}.bias`], width = weight.length;
  const y = new Float32Array(x.length);
  for (let start = 0; start < x.length; start += width) {
    const row = x.subarray(start, start + width);
    const mean = config.norm === "layernorm" ? row.reduce((sum, value) => sum + value, 0) / width : 0;
    const square = row.reduce((sum, value) => sum + (value - mean) ** 2, 0) / width;
    const scale = 1 / Math.sqrt(square + config.norm_eps);
    for (let i = 0; i < width; i++) y[start + i] = (row[i] - mean) * scale * weight[i] + (bias ? bias[i] : 0);
  }
  return y;
}

// --- positions

function rotate({ config }, heads, position) {  // (H, K) -> (H, K): coordinates (i, i + K/2) as in RoPE
  if (config.position !== "rope") return heads;
  const half = config.head_dim / 2, y = new Float32Array(heads.length);
  for (let i = 0; i < half; i++) {
    const angle = Math.fround(position * config.frequencies[i]), cos = Math.cos(angle), sin = Math.sin(angle);
    for (let at = i; at < heads.length; at += config.head_dim) {
      y[at] = heads[at] * cos - heads[at + half] * sin;
      y[at + half] = heads[at + half] * cos + heads[at] * sin;
    }
  }
  return y;
}

// --- attention

function newCache(config) {  // of the positions of a window: each has a key and a value (n_kv_heads, K) in each layer
  const layers = Array.from({ length: config.n_layers }, () => ({ keys: [], values: [] }));
  return { length: 0, layers };
}

function attention(model, layer, x, cache) {  // (D,) -> (D,)
  const { n_heads, n_kv_heads, head_dim, qk_norm } = model.config, name = `blocks.${layer}.attn`;
  const { keys, values } = cache.layers[layer], position = cache.length;
  let q = linear(model, `${name}.q_proj`, x);  // (H, K)
  let k = linear(model, `${name}.k_proj`, x);  // (n_kv_heads, K)
  if (qk_norm) [q, k] = [norm(model, `${name}.q_norm`, q), norm(model, `${name}.k_norm`, k)];
  q = rotate(model, q, position);  // (H, K)
  keys.push(rotate(model, k, position));  // (S, n_kv_heads, K)
  values.push(linear(model, `${name}.v_proj`, x));  // (S, n_kv_heads, K)
  const y = new Float32Array(q.length), scores = new Float64Array(keys.length);
  for (let head = 0; head < n_heads; head++) {
    const at = head * head_dim, shared = Math.floor(head * n_kv_heads / n_heads) * head_dim;
    let highest = -Infinity, total = 0;
    for (let s = 0; s < keys.length; s++) {
      const key = keys[s];
      let score = 0;
      for (let i = 0; i < head_dim; i++) score += q[at + i] * key[shared + i];
      scores[s] = score / Math.sqrt(head_dim);
      highest = Math.max(highest, scores[s]);
    }
    for (let s = 0; s < keys.length; s++) total += scores[s] = Math.exp(scores[s] - highest);
    for (let s = 0; s < keys.length; s++) {
      const value = values[s], share = scores[s] / total;
      for (let i = 0; i < head_dim; i++) y[at + i] += share * value[shared + i];
    }
  }
  return linear(model, `${name}.o_proj`, y);  // (D,)
}

// --- feed-forward network

function erf(x) {  // 2/sqrt(pi) exp(-x²) (x + 2x³/3 + 4x⁵/15 + ...): all terms have the sign of x
  if (Math.abs(x) > 6) return Math.sign(x);
  let term = x, sum = x;
  for (let n = 1; Math.abs(term) > 1e-17 * Math.abs(sum); n++) sum += term *= 2 * x * x / (2 * n + 1);
  return 2 / Math.sqrt(Math.PI) * Math.exp(-x * x) * sum;
}

const ACTIVATIONS = {
  relu: (x) => Math.max(x, 0),
  relu2: (x) => Math.max(x, 0) ** 2,
  gelu: (x) => x * (1 + erf(x / Math.SQRT2)) / 2,
  gelu_tanh: (x) => x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3))) / 2,
  silu: (x) => x / (1 + Math.exp(-x)),
  swiglu: (x) => x / (1 + Math.exp(-x)),  // of the gate
};

function ffn(model, layer, x) {  // (D,) -> (D,)
  const name = `blocks.${layer}.ffn`, activation = ACTIVATIONS[model.config.ffn];
  const up = linear(model, `${name}.up_proj`, x);  // (d_ff,)
  const gate = model.config.ffn === "swiglu" ? linear(model, `${name}.gate_proj`, x) : null;  // (d_ff,)
  const hidden = up.map((value, i) => (gate ? activation(gate[i]) * value : activation(value)));  // (d_ff,)
  return linear(model, `${name}.down_proj`, hidden);
}

// --- the model

const add = (x, y) => x.map((value, i) => value + y[i]);

function embed({ config, weights }, token, position) {  // -> (D,)
  const row = (matrix, i) => matrix.subarray(i * config.d_model, (i + 1) * config.d_model);
  const x = row(weights["embed.weight"], token).map((value) => value * config.embedding_multiplier);
  return config.position === "learned" ? add(x, row(weights["position.weight"], position)) : x;
}

const BLOCKS = {  // (D,) -> (D,)
  pre(model, layer, x, cache) {
    x = add(x, attention(model, layer, norm(model, `blocks.${layer}.attn_norm`, x), cache));
    return add(x, ffn(model, layer, norm(model, `blocks.${layer}.ffn_norm`, x)));
  },
  post(model, layer, x, cache) {
    x = norm(model, `blocks.${layer}.attn_norm`, add(x, attention(model, layer, x, cache)));
    return norm(model, `blocks.${layer}.ffn_norm`, add(x, ffn(model, layer, x)));
  },
};

function hiddenState(model, token, cache) {  // of the token that follows those in the cache: (D,)
  let x = embed(model, token, cache.length);  // (D,)
  for (let layer = 0; layer < model.config.n_layers; layer++) x = BLOCKS[model.config.norm_order](model, layer, x, cache);
  cache.length += 1;
  return norm(model, "norm", x);
}

function head({ weights }, x) {  // (D,) -> raw logits (V,); a tied head has no matrix of its own
  return product(weights["head.weight"] ?? weights["embed.weight"], x);
}

// --- decoding: argmax of the logits, without a softmax

function best(logits, n) {  // the n highest, in order, of equals the first: [{ token, logit }]
  const chosen = [];
  for (let token = 0; token < logits.length; token++) {
    const logit = logits[token];
    if (chosen.length === n && !(logit > chosen[n - 1].logit)) continue;
    const place = chosen.findIndex((candidate) => logit > candidate.logit);
    chosen.splice(place < 0 ? chosen.length : place, 0, { token, logit });
    chosen.length = Math.min(chosen.length, n);
  }
  return chosen;
}

function gumbel(seed) {  // -> a function that draws Gumbel noise; mulberry32 gives its uniform numbers
  return () => {
    seed = (seed + 0x6d2b79f5) | 0;
    let mixed = Math.imul(seed ^ (seed >>> 15), seed | 1);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61);
    return -Math.log(-Math.log((((mixed ^ (mixed >>> 14)) >>> 0) + 0.5) / 2 ** 32));
  };
}

function windowStart(length, seqLen) {  // of what the model sees of a text: moves by half a context
  const half = Math.max(1, Math.floor(seqLen / 2));
  return half * Math.max(0, Math.ceil((length - seqLen) / half));
}

function shares(logits, temperature) {  // -> a function that gives a logit its share of the softmax, for a reader
  const highest = logits.reduce((a, b) => Math.max(a, b));
  const total = logits.reduce((sum, logit) => sum + Math.exp((logit - highest) / temperature), 0);
  return (logit) => Math.exp((logit - highest) / temperature) / total;
}

// Yields, without end, each next token with its logit and the five best: { token, logit, candidates }; and null after
// each token that is only read. At a temperature above 0, argmax(logits / temperature + Gumbel noise) draws from the
// softmax. A candidate has its share before and after the temperature.
function* decode(model, prompt, temperature = 0, seed = 0) {
  const text = [...prompt], noise = gumbel(seed);
  let start = -1, cache;
  while (true) {
    const moved = windowStart(text.length, model.config.seq_len);
    if (moved !== start) [start, cache] = [moved, newCache(model.config)];
    while (start + cache.length < text.length - 1) {
      hiddenState(model, text[start + cache.length], cache);
      yield null;
    }
    const logits = head(model, hiddenState(model, text[text.length - 1], cache)), candidates = best(logits, 5);
    const noisy = temperature > 0 ? best(logits.map((logit) => logit / temperature + noise()), 1) : candidates;
    const token = noisy[0].token, logit = logits[token];
    if (candidates.every((candidate) => candidate.token !== token)) candidates.push({ token, logit });
    const [share, drawn] = [shares(logits, 1), shares(logits, temperature || 1)];
    text.push(token);
    yield { token, logit, candidates: candidates.map((row) => ({ ...row, share: share(row.logit), drawn: drawn(row.logit) })) };
  }
}

// --- the tokenizer: byte-level BPE, bytes or characters

// GPT-2's words. \s of JavaScript has U+FEFF and lacks U+0085, so white space is spelled out.
const WORDS = new RegExp(
  String.raw`'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\p{White_Space}\p{L}\p{N}]+` +
  String.raw`|\p{White_Space}+(?!\P{White_Space})|\p{White_Space}+`, "gu");
const UTF8 = { ignoreBOM: true };

// tokens: of each id its bytes, as characters U+0000 to U+00FF, and "" for a token that no text has;
// merges: [left, right, merged] in order, or null for a tokenizer of characters.
function readTokenizer({ tokens, merges, ...rest }) {
  const ids = new Map(tokens.map((token, id) => [token, id])), key = (left, right) => left * tokens.length + right;
  const ranks = new Map((merges ?? []).map(([left, right], rank) => [key(left, right), rank]));
  return { ...rest, tokens, ids, merges, rank: (left, right) => ranks.get(key(left, right)) ?? Infinity };
}

function encode(tokenizer, text) {
  const symbols = (piece) => Array.from(new TextEncoder().encode(piece), (byte) => String.fromCharCode(byte));
  if (tokenizer.merges) {
    const words = text.match(WORDS) ?? [];
    return words.flatMap((word) => mergeSymbols(tokenizer, symbols(word).map((symbol) => tokenizer.ids.get(symbol))));
  }
  return Array.from(text, (character) => {
    const id = tokenizer.ids.get(symbols(character).join(""));
    if (id === undefined) throw new Error(`The model does not know the character ${JSON.stringify(character)}.`);
    return id;
  });
}

function mergeSymbols({ rank, merges }, ids) {  // always the first pair of the lowest rank
  while (true) {
    let lowest = Infinity;
    for (let i = 1; i < ids.length; i++) lowest = Math.min(lowest, rank(ids[i - 1], ids[i]));
    if (lowest === Infinity) return ids;
    const [left, right, merged] = merges[lowest], after = [];
    for (let i = 0, done = false; i < ids.length; i++) {
      const isPair = !done && ids[i] === left && ids[i + 1] === right;
      if (isPair) i += 1;
      after.push(isPair ? merged : ids[i]);
      // a merge may make a pair of a lower rank, which is then the next
      if (isPair) done = rank(after[after.length - 2], merged) < lowest || rank(merged, ids[i + 1]) < lowest;
    }
    ids = after;
  }
}

function tokenBytes(tokenizer, id) {
  return Uint8Array.from(tokenizer.tokens[id] ?? "", (symbol) => symbol.charCodeAt(0));
}
