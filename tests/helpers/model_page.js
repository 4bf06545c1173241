// node model_page.js PAGE: runs the code of lm/lab/formats/templates/model.js on the model and the tokenizer of a page.
// Standard input: { texts, rows, prompts, n_tokens }. Standard output: the ids of each text, the text that they give,
// the logits after each token of each row of ids, and for each prompt of ids the steps of decoding:
// [[token, five candidates], ...].
const fs = require("fs"), path = require("path");

const source = fs.readFileSync(path.join(__dirname, "../../lm/lab/formats/templates/model.js"), "utf8");
const { readTensor, readTokenizer, encode, tokenBytes, newCache, hiddenState, head, decode, UTF8 } = new Function(
  `${source}; return { readTensor, readTokenizer, encode, tokenBytes, newCache, hiddenState, head, decode, UTF8 }`,
)();

const html = fs.readFileSync(process.argv[2], "utf8"), weights = {};
for (const [, name, dtype, data] of html.matchAll(/<script type="text\/plain" data-name="(.*)" data-dtype="(.*)">(.*)<\/script>/g)) {
  weights[name] = readTensor(data, dtype);
}
const settings = JSON.parse(html.match(/<script type="application\/json" id="settings">(.*)<\/script>/)[1]);
const model = { config: settings.config, weights }, tokenizer = readTokenizer(settings.tokenizer);

const { texts, rows, prompts, n_tokens } = JSON.parse(fs.readFileSync(0, "utf8"));

function textOf(ids) {
  const decoder = new TextDecoder("utf-8", UTF8);
  return ids.map((id) => decoder.decode(tokenBytes(tokenizer, id), { stream: true })).join("") + decoder.decode();
}

function logitsOf(row) {
  const cache = newCache(model.config);
  return row.map((token) => [...head(model, hiddenState(model, token, cache))]);
}

function* steps(prompt) {
  let remaining = n_tokens;
  for (const step of decode(model, prompt)) {
    if (step) yield [step.token, step.candidates.map(({ token, logit }) => [token, logit])];
    if (step && --remaining === 0) return;
  }
}

const ids = texts.map((text) => encode(tokenizer, text));
const answer = { ids, texts: ids.map(textOf), logits: rows.map(logitsOf), steps: prompts.map((prompt) => [...steps(prompt)]) };
console.log(JSON.stringify(answer));
