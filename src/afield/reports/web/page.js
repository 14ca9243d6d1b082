"use strict";
(() => {
  const pictures = JSON.parse(document.getElementById("pictures").textContent);
  const root = document.documentElement;
  const narrow = () => window.innerWidth < 600;
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  root.classList.toggle("dark", dark.matches);
  const drawn = new Map(); // name -> the number of the view that is shown

  const css = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const axis = (own) => ({
    gridcolor: css("--edge"), zerolinecolor: css("--edge"), linecolor: css("--edge"), automargin: true, ...own,
    title: { standoff: 8, ...own?.title },
  });

  function layout(own) {
    const small = narrow();
    return {
      ...own,
      xaxis: axis({ ...own.xaxis, nticks: small ? 6 : undefined }),
      yaxis: axis(own.yaxis),
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif", size: small ? 11 : 13, color: css("--ink") },
      hoverlabel: { bgcolor: css("--card"), bordercolor: css("--edge"), font: { color: css("--ink") } },
      legend: { orientation: "h", y: -0.2, yanchor: "top", x: 0, ...own.legend },
      margin: { l: small ? 44 : 60, r: small ? 8 : 16, t: small ? 36 : 10, b: 44 },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: css("--soft"), activecolor: css("--accent") },
      showlegend: own.showlegend,
      dragmode: small ? false : "zoom",
    };
  }

  function draw(name) {
    const [, told, own] = pictures[name].views[drawn.get(name) ?? 0];
    const data = structuredClone(told); // plotly writes into what it is given
    if (narrow()) for (const trace of data) delete trace.texttemplate; // cells are narrower than their numbers
    const config = { responsive: true, displaylogo: false, scrollZoom: false, plotlyServerURL: "",
      modeBarButtonsToRemove: ["select2d", "lasso2d", "sendChartToCloud", "sendDataToCloud"], // nobody's data leave this page
      displayModeBar: narrow() ? true : "hover", toImageButtonOptions: { format: "svg", filename: name } };
    return Plotly.react(document.getElementById("plot-" + name), data, layout(own), config);
  }

  function view(name, number, buttons) {
    drawn.set(name, number);
    for (const [i, button] of buttons.entries()) button.setAttribute("aria-pressed", String(i === number));
    draw(name);
  }

  for (const [name, picture] of Object.entries(pictures)) {
    const place = document.getElementById("views-" + name);
    if (!place || picture.views.length < 2) continue;
    if (picture.views.length > 8) {
      const select = document.createElement("select");
      select.setAttribute("aria-label", "View");
      picture.views.forEach(([label], i) => select.add(new Option(label, String(i))));
      select.onchange = () => view(name, Number(select.value), []);
      place.append(select);
    } else {
      const buttons = picture.views.map(([label], i) => {
        const button = document.createElement("button");
        button.type = "button";
        button.textContent = label;
        button.setAttribute("aria-pressed", String(i === 0));
        return button;
      });
      buttons.forEach((button, i) => { button.onclick = () => view(name, i, buttons); });
      place.append(...buttons);
    }
  }

  // A tab draws its plots when it is first seen: a phone need not draw them all at once.
  function show(id) {
    for (const section of document.querySelectorAll("main > section")) section.hidden = section.id !== id;
    for (const tab of document.querySelectorAll("nav button")) {
      const chosen = tab.dataset.tab === id;
      tab.setAttribute("aria-selected", String(chosen));
      if (chosen) tab.scrollIntoView({ block: "nearest", inline: "nearest" });
    }
    for (const plot of document.querySelectorAll("#" + id + " .plot")) {
      const name = plot.id.slice(5);
      if (!drawn.has(name)) { drawn.set(name, 0); draw(name); } else Plotly.Plots.resize(plot);
    }
  }

  const tabs = [...document.querySelectorAll("nav button")];
  tabs.forEach((tab, i) => {
    tab.onclick = () => { history.replaceState(null, "", "#" + tab.dataset.tab); show(tab.dataset.tab); };
    tab.onkeydown = (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (step) { const next = tabs[(i + step + tabs.length) % tabs.length]; next.focus(); next.click(); }
    };
  });

  function repaint() { for (const name of drawn.keys()) draw(name); }
  document.getElementById("theme").onclick = () => { root.classList.toggle("dark"); repaint(); };
  dark.addEventListener("change", (event) => { root.classList.toggle("dark", event.matches); repaint(); });
  let was = narrow();
  window.addEventListener("resize", () => { if (narrow() !== was) { was = narrow(); repaint(); } });

  const wanted = location.hash.slice(1);
  show(tabs.some((tab) => tab.dataset.tab === wanted) ? wanted : tabs[0].dataset.tab);
})();
