// Text: the loss of each token of a text, or the difference of two models.

let scored = null; // the answer of POST /text, with {names, asked, chosen, show}
const DARKEST = { loss: 8, difference: 2 }; // nats at which a colour is full

async function scoreText(form) {
  const fields = fieldsOf(form);
  const names = chosenModels();
  const question = { ...fields, runs: names, passage: (fields.passage ?? 1) - 1 };
  const answer = await (await post("/text", question)).json();
  scored = { ...answer, names, asked: question, chosen: null, show: showLosses };
  offerColours(names);
  const box = tokenBox("The text", scored);
  scored.tokens.forEach((row) => addToken(box, row));
  $("scored").replaceChildren(box);
  $("next").disabled = Boolean(question.text) || question.passage + 1 >= scored.n_passages;
  $("text-summary").textContent = summary();
  paintText();
  const worst = (a, b) => (b.losses[0] > a.losses[0] ? b : a);
  if (scored.tokens.length) choose(scored, scored.tokens.reduce(worst));
}

// The colours to choose from: the loss of each model, and with two models first their difference.
function offerColours(names) {
  const losses = names.map((name, i) => [i, `loss of ${short(name)}`]);
  const choices = names.length > 1 ? [["difference", "difference"], ...losses] : losses;
  const select = $("text-colour");
  const before = select.options.length === choices.length ? select.value : "";
  select.replaceChildren(...choices.map(([value, text]) => el("option", { value }, text)));
  if (before) select.value = before; // as many models as before: the choice stays
}

function paintText() {
  const { names, tokens } = scored;
  const which = $("text-colour").value;
  const isDifference = which === "difference";
  for (const { span, losses } of tokens) {
    const difference = losses[1] - losses[0];
    const better = names[difference > 0 ? 0 : 1];
    const color = colorOf(isDifference ? better : names[which]);
    const share = isDifference ? Math.abs(difference) / DARKEST.difference : losses[which] / DARKEST.loss;
    span.style.background = faded(color, share);
  }
  const better = (name) => scale("equal", `${short(name)} better by ${DARKEST.difference} nats`, colorOf(name));
  const loss = (name) => scale("0", `${DARKEST.loss} nats`, colorOf(name));
  $("text-scale").replaceChildren(...(isDifference ? names.map(better) : [loss(names[which])]));
}

function summary() {
  const { names, tokens, n_bytes, n_passages, asked } = scored;
  const means = names.map((name, i) => {
    const total = tokens.reduce((sum, row) => sum + row.losses[i], 0);
    const bits = fixed(total / Math.LN2 / n_bytes);
    return `${short(name)} ${fixed(total / tokens.length)} nats per token, ${bits} bits per byte`;
  });
  const passage = `Passage ${asked.passage + 1} of ${grouped(n_passages)} of the validation text`;
  return `${asked.text ? "Your text" : passage}, ${grouped(tokens.length)} tokens: ${means.join("; ")}.`;
}

function showLosses({ label, losses }) {
  const rows = losses.map((loss, i) => {
    const name = scored.names[i];
    return { label: short(name), share: loss / 10, value: `${fixed(loss)} nats`, color: colorOf(name) };
  });
  $("token").replaceChildren(el("p", {}, el("code", {}, quoted(label))), bars(rows));
  $("token").hidden = false;
}
