// --- the page

const pause = () => new Promise((resolve) => setTimeout(resolve)); // lets the browser draw, and hear a click
const MAX_BUSY = 25; // milliseconds between pauses
const ACCENT = "var(--accent)";
let running = null; // {stopped} of the text that is being written

async function load() {
  const weights = {};
  for (const block of document.querySelectorAll("script[data-dtype]")) {
    weights[block.dataset.name] = readTensor(block.textContent.trim(), block.dataset.dtype);
    block.remove();
    await pause();
  }
  const { config, tokenizer } = JSON.parse($("settings").textContent);
  return { model: { config, weights }, tokenizer: readTokenizer(tokenizer) };
}

async function run(loaded) {
  const { model, tokenizer } = loaded, own = (running = { stopped: false });
  const maxTokens = Number($("max_new_tokens").value);
  const [temperature, seed] = [Number($("temperature").value), Number($("seed").value)];
  const prompt = $("prompt").value, start = performance.now(), decoder = new TextDecoder("utf-8", UTF8), steps = [];
  const view = { chosen: null, enter: () => $("step").querySelector("button")?.focus(), show: (row) => showCandidates(loaded, view, prompt, steps, row, temperature) };
  const box = tokenBox("Text", view);
  box.id = "output";
  box.append(el("span", { className: "soft" }, prompt));
  $("output").replaceWith(box);
  $("step").hidden = true;
  $("back").hidden = !branch.before.length;
  let drawn = start;
  for (const step of decode(model, [tokenizer.begin, ...encode(tokenizer, prompt)], temperature, seed)) {
    if (own.stopped || (step && tokenizer.stops.includes(step.token))) break;
    if (step) {
      const row = { ...step, index: steps.length, text: decoder.decode(tokenBytes(tokenizer, step.token), { stream: true }) };
      steps.push(row);
      addStep(box, view, row);
      if (steps.length === maxTokens) break;
    }
    if (performance.now() - drawn < MAX_BUSY) continue;
    $("status").textContent = step ? `${steps.length} tokens` : "Reading the prompt";
    await pause();
    drawn = performance.now();
  }
  if (running !== own) return;
  box.append(decoder.decode());
  const seconds = (performance.now() - start) / 1000;
  $("status").textContent = `${steps.length} tokens, ${Math.round(steps.length / seconds)} per second`;
}

function addStep(box, view, row) {
  const other = row.candidates.find(({ token }) => token !== row.token);
  addToken(box, row);
  const lead = row.logit - other.logit;
  row.span.style.background = faded(ACCENT, unsure(lead));
  if (!view.chosen && lead < 1) choose(view, row); // at first, the first uncertain token
}

function showCandidates(loaded, view, prompt, steps, row, temperature) {
  const candidates = row.candidates.map((candidate) => ({ ...candidate, ...named(loaded.tokenizer, candidate.token) }));
  const pick = (text) => {
    branch.pick($("prompt"), [prompt, ...steps.slice(0, row.index).map((step) => step.text), text].join(""));
    generate(loaded);
  };
  const options = { color: ACCENT, sampled: temperature > 0, pick, back: () => view.chosen?.span.focus() };
  const change = temperature > 0 ? `, before and after temperature ${temperature}` : "";
  $("step").replaceChildren(el("p", { className: "soft" }, `Candidates for token ${row.index + 1}, with their shares${change}`), candidateBars({ token: row.token, candidates }, options));
  $("step").hidden = false;
}

function named(tokenizer, id) { // a token by itself; a part of a character shows its bytes
  const bytes = tokenBytes(tokenizer, id), text = new TextDecoder("utf-8", UTF8).decode(bytes);
  const spelled = Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join(" ");
  return { text, label: text.replaceAll("\ufffd", "") ? text : tokenizer.names[id] || `<${spelled || id}>` };
}

async function generate(loaded) {
  if (running) running.stopped = true;
  $("stop").hidden = false;
  const own = run(loaded), started = running;
  await own.catch(showError);
  if (running === started) $("stop").hidden = true;
}

async function main() {
  const loaded = await load();
  $("scale").replaceChildren(scale("sure", "unsure: another token is as likely", ACCENT));
  $("generate").disabled = false;
  $("stop").onclick = () => { running.stopped = true; };
  $("back").onclick = () => { branch.takeBack($("prompt")); generate(loaded); };
  $("prompt").onkeydown = (event) => { if (event.ctrlKey && event.key === "Enter") $("generate").click(); };
  $("form").onsubmit = (event) => {
    event.preventDefault();
    branch.clear();
    generate(loaded);
  };
  await generate(loaded);
}

const showError = (error) => { $("status").textContent = error.message; };
main().catch(showError);
