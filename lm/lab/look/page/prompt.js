// Prompt: the continuations of one or two models, the candidates of each token, and a click on a candidate.

let continuation = null; // {names, asked, steps: the rows of each model, boxes, chosen, show, enter, hasParted}
let stream = null; // what aborts the stream

async function continuePrompt(form) {
  stream?.abort();
  const own = (stream = new AbortController());
  const names = chosenModels();
  const asked = { ...fieldsOf(form), runs: names };
  const view = (continuation = { names, asked, steps: names.map(() => []), chosen: null, hasParted: false });
  view.show = (row) => showCandidates(view, row);
  view.enter = () => $("step").querySelector("button.bar")?.focus();
  view.boxes = names.map((name) => tokenBox(`Text of ${short(name)}`, view));
  view.boxes.forEach((box) => box.append(el("span", { className: "soft" }, asked.prompt)));
  $("continuations").replaceChildren(...names.map((name, i) => el("div", {}, heading(name), view.boxes[i])));
  $("prompt-scale").replaceChildren(scale("sure: 5 ahead", "unsure: level or behind", colorOf(names[0])));
  $("parting").textContent = "";
  $("step").hidden = true;
  $("stop").hidden = false;
  $("back").hidden = !branch.before.length; // `branch`: see tokens.js
  try {
    for await (const row of streamed("/prompt", asked, own.signal)) {
      if (row.error) throw new Error(row.error);
      if (row.note) view.boxes[row.model].before(el("p", { className: "soft" }, row.note));
      else addStep(view, row);
    }
    endSteps(view);
  } finally {
    if (stream === own) $("stop").hidden = true;
  }
}

function addStep(view, row) {
  const steps = view.steps[row.model];
  row.index = steps.length;
  row.start = steps.at(-1)?.stop ?? 0; // in the continued text
  row.stop = row.start + row.text.length;
  steps.push(row);
  addToken(view.boxes[row.model], row);
  row.span.style.background = faded(colorOf(view.names[row.model]), unsure(row.lead));
  if (!view.chosen && row.model === 0 && row.lead < 1) choose(view, row);
  if (view.chosen && view.chosen !== row && row.start === view.chosen.start) view.show(view.chosen); // now beside it
  markParting(view);
}

function endSteps(view) {
  const rows = view.steps[0];
  if (!view.chosen && rows.length) choose(view, rows.reduce((least, row) => (row.lead < least.lead ? row : least)));
  view.chosen?.span.scrollIntoView({ block: "nearest" }); // on a phone the candidates would cover the token
  if (view.steps.length < 2 || view.hasParted) return;
  const [first, second] = view.steps.map((steps) => steps.map((row) => row.text).join(""));
  $("parting").textContent = first === second ? "They agree to the end." : "One text ends where the other goes on.";
}

// Mark the tokens at which the texts of two models begin to differ.
function markParting(view) {
  if (view.hasParted || view.steps.length < 2) return;
  const [first, second] = view.steps.map((rows) => rows.map((row) => row.text).join(""));
  const places = [...Array(Math.min(first.length, second.length)).keys()];
  const place = places.find((i) => first[i] !== second[i]);
  if (place === undefined) return;
  view.hasParted = true;
  const pair = view.steps.map((rows) => rows.find((row) => row.stop > place));
  pair.forEach((row) => row.span.classList.add("parts"));
  const where = `They part at token ${pair[0].index + 1}, where the bar is`;
  $("parting").textContent = `${where}; from there on they continue different texts.`;
}

// Show the candidates of a token, and beside them the candidates of the other model at the same place of the text.
function showCandidates(view, row) {
  const rows = view.steps.map((steps) => steps.findLast((other) => other.start <= row.start));
  rows[row.model] = row;
  const lists = rows.filter(Boolean).map((shown) => candidateList(view, shown));
  $("step").replaceChildren(el("div", { className: "pair" }, ...lists));
  $("step").hidden = false;
}

function candidateList(view, row) {
  const before = view.steps[row.model].slice(0, row.index).map((step) => step.text);
  const pick = (text) => {
    branch.pick($("prompt-form").elements.prompt, [view.asked.prompt, ...before, text].join(""));
    ask("prompt");
  };
  const look = () => {
    $("attention-form").elements.text.value = [view.asked.prompt, ...before, row.text].join("");
    answered.delete("attention");
    show("attention");
  };
  const color = colorOf(view.names[row.model]);
  const facts = `token ${row.index + 1}: ${quoted(row.label)}, rank ${row.rank}, lead ${fixed(row.lead, 2)}; `;
  const isWhole = row.text && !row.text.includes("\ufffd"); // else its text would be encoded as other tokens
  const link = isWhole ? el("button", { type: "button", className: "link", onclick: look }, "attention of this token") : "";
  const options = { color, sampled: view.asked.temperature > 0, pick, back: () => view.chosen?.span.focus() };
  const head = el("p", { className: "soft" }, facts, link);
  return el("div", {}, heading(view.names[row.model]), head, candidateBars(row, options));
}
