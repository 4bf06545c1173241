
// --- the page: text reaches it as textContent alone, never as markup

const element = (id) => document.getElementById(id);
const pause = () => new Promise((resolve) => setTimeout(resolve));  // lets the browser draw, and hear a click
const MAX_BUSY = 25;  // milliseconds between pauses
let stopped = false;

async function load() {
  const weights = {};
  for (const block of document.querySelectorAll("script[data-dtype]")) {
    weights[block.dataset.name] = readTensor(block.textContent.trim(), block.dataset.dtype);
    block.remove();
    await pause();
  }
  const { config, tokenizer } = JSON.parse(element("settings").textContent);
  return { model: { config, weights }, tokenizer: readTokenizer(tokenizer) };
}

async function run({ model, tokenizer }) {
  const maxTokens = Number(element("max_new_tokens").value), decoder = new TextDecoder("utf-8", UTF8);
  const sampling = [Number(element("temperature").value), Number(element("seed").value)];
  const prompt = element("prompt").value, start = performance.now();
  element("output").replaceChildren(prompt);
  element("candidates").replaceChildren();
  let tokens = 0, drawn = start;
  for (const step of decode(model, [tokenizer.begin, ...encode(tokenizer, prompt)], ...sampling)) {
    if (stopped || tokenizer.stops.includes(step?.token)) break;
    if (step) {
      const text = decoder.decode(tokenBytes(tokenizer, step.token), { stream: true });
      element("output").append(tokenSpan(tokenizer, step, text));
      tokens += 1;
      if (tokens === maxTokens) break;
    }
    if (performance.now() - drawn < MAX_BUSY) continue;
    element("status").textContent = step ? `${tokens} tokens` : "Reading the prompt";
    await pause();
    drawn = performance.now();
  }
  element("output").append(decoder.decode());
  const seconds = (performance.now() - start) / 1000;
  element("status").textContent = `${tokens} tokens, ${Math.round(tokens / seconds)} per second`;
}

function tokenSpan(tokenizer, { token, candidates }, text) {
  const span = document.createElement("span");
  span.textContent = text;  // none while a character is unfinished
  span.className = "token";
  span.tabIndex = document.querySelector(".token") ? -1 : 0;  // Tab reaches the first one, arrows the others
  span.onmouseenter = span.onfocus = () => showCandidates(tokenizer, span, token, candidates);
  return span;
}

function showCandidates(tokenizer, span, token, candidates) {
  document.querySelector(".token.shown")?.classList.remove("shown");
  span.classList.add("shown");
  element("candidates").replaceChildren(...candidates.map((candidate) => {
    const item = document.createElement("li"), word = document.createElement("code");
    word.textContent = readable(tokenizer, candidate.token);
    item.append(word, ` ${candidate.logit.toFixed(2)}`);
    if (candidate.token === token) item.className = "chosen";
    return item;
  }));
}

function readable(tokenizer, id) {  // a token by itself, with what is not seen as a sign
  const text = new TextDecoder("utf-8", UTF8).decode(tokenBytes(tokenizer, id)) || tokenizer.names[id] || `<${id}>`;
  return text.replace(/[\0-\x20]/g, (sign) => (sign === " " ? "␣" : String.fromCharCode(0x2400 + sign.charCodeAt())));
}

element("output").onkeydown = (event) => {
  const step = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
  if (!step || !event.target[step]) return;
  event.preventDefault();
  event.target.tabIndex = -1;
  event.target[step].tabIndex = 0;
  event.target[step].focus();
};

async function main() {
  const loaded = await load(), [generate, stop] = [element("generate"), element("stop")];
  element("status").textContent = "";
  generate.disabled = false;
  stop.onclick = () => { stopped = true; };
  element("prompt").onkeydown = (event) => { if (event.ctrlKey && event.key === "Enter") generate.click(); };
  element("form").onsubmit = async (event) => {
    event.preventDefault();
    [stopped, generate.disabled, stop.disabled] = [false, true, false];
    await run(loaded).catch(showError);
    [generate.disabled, stop.disabled] = [false, true];
  };
}

const showError = (error) => { element("status").textContent = error.message; };
main().catch(showError);
