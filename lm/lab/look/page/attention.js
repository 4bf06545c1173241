// Attention: how much a token takes from each token before it, as shades of the text, by one head or the mean of all.

let attentions = []; // for each model {name, text, column, tokens, position, weights: (L, H, S), heads, chosen, show}

async function showAttention(form) {
  const { text } = fieldsOf(form);
  attentions = chosenModels().map((name) => ({ name, text, column: el("div"), chosen: null }));
  $("attentions").replaceChildren(...attentions.map((view) => view.column));
  for (const view of attentions) {
    view.show = (row) => (row === view.chosen ? attend(view, row.index).catch(showError) : showWeight(view, row));
    await attend(view, null);
  }
}

async function attend(view, position) {
  if (position === null || position !== view.position) {
    view.asked = position;
    const answer = await (await post("/attention", { runs: [view.name], text: view.text, position })).json();
    if (view.asked !== position) return; // another token has been chosen meanwhile
    view.position = answer.position;
    view.weights = answer.weights;
    if (!view.tokens) buildAttention(view, answer);
  }
  paintAttention(view);
}

function buildAttention(view, answer) {
  const box = tokenBox(`Text of ${short(view.name)}`, view);
  view.tokens = answer.tokens.map((token, index) => ({ ...token, index }));
  view.tokens.forEach((row) => addToken(box, row));
  view.chosen = view.tokens[view.position];
  view.chosen.span.classList.add("chosen");
  const heads = answer.weights.flatMap((layer, i) => layer.map((_, k) => [`${i} ${k}`, `layer ${i + 1}, head ${k + 1}`]));
  const options = [["", "the mean of all heads"], ...heads].map(([value, text]) => el("option", { value }, text));
  view.heads = el("select", { ariaLabel: "Head", onchange: () => paintAttention(view) }, ...options);
  view.detail = el("div");
  view.column.replaceChildren(heading(view.name), el("label", {}, "Head ", view.heads), box, view.detail);
}

function shownWeights({ heads, weights }) {
  const [layer, head] = heads.value.split(" ");
  if (head !== undefined) return weights[layer][head];
  const rows = weights.flat();
  return rows[0].map((_, s) => rows.reduce((sum, row) => sum + row[s], 0) / rows.length);
}

function paintAttention(view) {
  const shares = shownWeights(view);
  const most = Math.max(...shares);
  const color = colorOf(view.name);
  view.tokens.forEach(({ span }, i) => {
    span.style.background = faded(color, i < shares.length ? shares[i] / most : 0);
    span.classList.toggle("unseen", i > view.position);
  });
  const largest = [...shares.keys()].sort((a, b) => shares[b] - shares[a]).slice(0, 5);
  const row = (i) => ({ label: quoted(view.tokens[i].label), share: shares[i], value: percent(shares[i]), color });
  const what = `Token ${view.position + 1} of ${view.tokens.length}, ${quoted(view.chosen.label)}`;
  const facts = `${what}, in ${view.heads.selectedOptions[0].textContent}:`;
  const scales = scale("0", percent(most), color);
  view.detail.replaceChildren(el("p", { className: "soft" }, facts), bars(largest.map(row)), scales);
}

function showWeight(view, { index, label }) {
  const share = shownWeights(view)[index];
  const seen = `${percent(share ?? 0)} goes to token ${index + 1}, ${quoted(label)}.`;
  view.detail.firstChild.textContent = share === undefined ? `${quoted(label)} comes later and is not seen.` : seen;
}
