// Questions to the server, the chosen models, and how a run is named and coloured.

let runs = []; // as GET /runs gives them
let labels = new Map(); // the short name of each run
const DASHES = { "-": "", "--": "6 3", "-.": "6 3 1 3", ":": "2 3" };
const grouped = (value) => value.toLocaleString("en");
const fixed = (value, digits = 3) => (value === null || value === undefined ? "" : value.toFixed(digits));

async function post(route, question, signal) {
  const headers = { "Content-Type": "application/json" };
  const response = await fetch(route, { method: "POST", signal, headers, body: JSON.stringify(question) });
  if (!response.ok) throw new Error((await response.json()).error);
  return response;
}

async function* streamed(route, question, signal) {
  const reader = (await post(route, question, signal)).body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  while (true) {
    const { done, value } = await reader.read();
    if (done) throw new Error("The server stopped before the answer was complete");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const row of lines.map((line) => JSON.parse(line))) {
      if (row.end) return;
      yield row;
    }
  }
}

const chosenModels = () => [...new Set([$("first").value, $("second").value].filter(Boolean))];

// The values of the fields of a form, without empty numbers.
function fieldsOf(form) {
  const fields = [...form.elements].filter((field) => field.name && (field.type !== "number" || field.value !== ""));
  const value = (field) => (field.type === "number" ? field.valueAsNumber : field.value);
  return Object.fromEntries(fields.map((field) => [field.name, value(field)]));
}

const runOf = (name) => runs.find((run) => run.name === name);
const colorOf = (name) => runOf(name)?.color ?? "var(--ink)";
const short = (name) => labels.get(name) ?? name;

// A line in the colour and with the dashes of a run, as in the chart.
function swatch(name) {
  const box = shape("svg", { class: "swatch", viewBox: "0 0 24 10", "aria-hidden": true });
  const dashes = DASHES[runOf(name)?.dashes ?? "-"];
  const style = { stroke: colorOf(name) };
  box.append(shape("line", { x2: 24, y1: 5, y2: 5, "stroke-width": 4, "stroke-dasharray": dashes, style }));
  return box;
}

const heading = (name) => el("h2", { title: name }, swatch(name), short(name));

// Return a short name for each name: without what all have in common and without the hash at the end.
function shortened(names) {
  const words = names.map((name) => name.split(/[-/]/));
  const isCommon = (word) => names.length > 1 && words.every((list) => list.includes(word));
  const isHash = (word) => /^[0-9a-f]{8,10}$/.test(word);
  const kept = words.map((list) => list.filter((word) => !isCommon(word) && !isHash(word)).join("-"));
  const isUnique = (word) => word && kept.indexOf(word) === kept.lastIndexOf(word);
  return new Map(names.map((name, i) => [name, isUnique(kept[i]) ? kept[i] : name]));
}
